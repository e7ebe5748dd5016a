"""Rewards from a judge: a model behind somebody's OpenAI endpoint.

Images go there as data URLs, since the endpoint is not ours and has no store. This is the one
place from which an environment sends pixels out; they are read when the request is made, and
nothing is kept.
"""

from __future__ import annotations

import asyncio
import base64
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from sightline.envs.protocol import Messages
from sightline.errors import JudgeFailed
from sightline.media import MediaRef
from sightline.message import ImagePart, Message
from sightline.run.stages import CURRENT_STAGE

ReadImage = Callable[[MediaRef], bytes]
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 20.0
RETRY_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
SCORE_PATTERN = r"(?i)score\W{0,4}(-?\d+(?:\.\d+)?)"
"""The last of `Score: 0.7`, `**score** = 7` and the like in an answer."""


@dataclass(frozen=True)
class JudgeModel:
    """`base_url` ends where `/chat/completions` begins, as for any OpenAI client."""

    base_url: str
    model: str
    api_key: str = ""
    timeout_s: float = 60.0
    """Of one try, from connecting to the last byte."""
    tries: int = 4
    max_tokens: int = 1024
    temperature: float = 0.0
    first_wait_s: float = FIRST_RETRY_S
    """Before the second try; it doubles from there."""

    async def score(
        self,
        messages: Messages,
        read: ReadImage,
        low: float = 0.0,
        high: float = 1.0,
        pattern: str = SCORE_PATTERN,
    ) -> float:
        """The number in the judge's answer. The last message should say how to write it."""
        answer = await self.ask(messages, read)
        found = re.findall(pattern, answer)
        if not found:
            raise JudgeFailed(
                f"the judge {self.model} gave no score: {answer[-200:]!r}",
                "ask it to end with a line such as `Score: 0.5`, or pass a pattern",
            )
        value = float(found[-1])
        if not low <= value <= high:
            raise JudgeFailed(
                f"the judge {self.model} gave {value}, outside {low} to {high}",
                "say the range in the question, or pass another",
            )
        return value

    async def ask(self, messages: Messages, read: ReadImage) -> str:
        """The judge's answer. `read` gives the bytes of an image, as `chat.get` does."""
        with CURRENT_STAGE.get().begin("judge", judge=self.model):
            return await self._ask(messages, read)

    async def _ask(self, messages: Messages, read: ReadImage) -> str:
        body = {
            "model": self.model,
            "messages": await asyncio.to_thread(to_openai_messages, messages, read),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        failures: list[_Failure] = []
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                answer = await self._try(session, body)
                if isinstance(answer, str):
                    return answer
                failures.append(answer)
                if not answer.is_retryable or len(failures) >= self.tries:
                    break
                wait_s = min(self.first_wait_s * 2 ** (len(failures) - 1), LONGEST_RETRY_S)
                await asyncio.sleep(wait_s * (0.5 + random.random()))
        raise JudgeFailed(
            f"the judge {self.model} at {self.base_url} failed {len(failures)} times; "
            f"the last: {failures[-1].reason}",
            "look at that endpoint, its key and its limits",
        )

    async def _try(self, session: aiohttp.ClientSession, body: Any) -> str | _Failure:
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            async with session.post(url, json=body) as http:
                if http.status != 200:
                    text = (await http.text(errors="replace"))[:200]
                    return _Failure(f"{http.status} {text}", http.status in RETRY_STATUSES)
                answer = await http.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return _Failure(f"{type(error).__name__} {error}".rstrip(), is_retryable=True)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if not isinstance(content, str):
            return _Failure(f"an answer without choices[0].message.content: {str(answer)[:200]}")
        return content


@dataclass(frozen=True)
class _Failure:
    reason: str
    is_retryable: bool = False


def to_openai_messages(messages: Messages, read: ReadImage) -> list[dict[str, Any]]:
    """Messages as any OpenAI endpoint takes them, with images as data URLs."""
    return [
        message if isinstance(message, dict) else _to_openai_message(message, read)
        for message in messages
    ]


def _to_openai_message(message: Message, read: ReadImage) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, ImagePart):
            data = base64.b64encode(read(part.ref)).decode()
            url = f"data:{part.ref.mime};base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": message.role, "content": parts}
