"""Rewards from a judge model behind any OpenAI-compatible endpoint.

The endpoint has no image store, so images are sent as data URLs.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sightline.config.secret_refs import resolve_secret
from sightline.envs.openai_endpoint import RETRY_STATUSES, OpenAIClient, read_completion
from sightline.envs.protocol import Messages
from sightline.errors import EngineError, JudgeFailed
from sightline.media import MediaRef
from sightline.message import to_openai_message

ReadImage = Callable[[MediaRef], bytes]
LONGEST_RETRY_S = 20.0
SCORE_PATTERN = r"(?i)score\W{0,4}(-?\d+(?:\.\d+)?)"
"""Matches, for example, `Score: 0.7` and `**score** = 7`."""


@dataclass(frozen=True)
class JudgeModel:
    """A judge at `base_url`, without `/chat/completions`, as for any OpenAI client."""

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    """The key itself, or a reference to it: env:NAME or file:PATH."""
    timeout_s: float = 60.0
    """Timeout for one try, from connecting to the last byte."""
    tries: int = 4
    max_tokens: int = 1024
    temperature: float = 0.0
    first_wait_s: float = 0.5
    """Pause before the second try. It doubles after each failure."""

    async def score(
        self,
        messages: Messages,
        read: ReadImage,
        low: float = 0.0,
        high: float = 1.0,
        pattern: str = SCORE_PATTERN,
    ) -> float:
        """Return the last score in the judge's answer.

        The last message should specify the format of the score.
        """
        answer = await self.ask(messages, read)
        scores = re.findall(pattern, answer)
        if not scores:
            raise JudgeFailed(
                f"the judge {self.model} gave no score: {answer[-200:]!r}",
                "ask it to end with a line such as `Score: 0.5`, or pass a pattern",
            )
        value = float(scores[-1])
        if not low <= value <= high:
            raise JudgeFailed(
                f"the judge {self.model} gave {value}, outside {low} to {high}",
                "state the range in the question, or pass other bounds",
            )
        return value

    async def ask(self, messages: Messages, read: ReadImage) -> str:
        """Return the judge's answer. `read` returns the bytes of an image, as `chat.get` does."""
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        answer = await self._post("/chat/completions", messages, read, sampling)
        try:
            return read_completion(answer).text
        except EngineError as error:
            raise JudgeFailed(f"the judge {self.model}: {error.problem}", error.fix) from error

    async def rate(self, messages: Messages, read: ReadImage) -> float:
        """Return the reward of a conversation from a reward model on `sightline serve`."""
        reward = (await self._post("/reward", messages, read, {})).get("reward")
        if not isinstance(reward, float) or not math.isfinite(reward):
            problem = f"the reward model at {self.base_url} gave the reward {reward!r}"
            raise JudgeFailed(problem, "see the server's log")
        return reward

    async def _post(
        self, path: str, messages: Messages, read: ReadImage, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Send a conversation. Raise JudgeFailed if all tries fail."""

        def encode() -> list[dict[str, Any]]:
            return [
                message
                if isinstance(message, dict)
                else to_openai_message(message, lambda ref: ref.data_url(read(ref)))
                for message in messages
            ]

        sent = await asyncio.to_thread(encode)
        # Create a client per call: several event loops share a judge but cannot share connections.
        client = OpenAIClient(
            self.base_url,
            self.model,
            deadline_s=math.inf,
            max_tries=self.tries,
            timeout_s=self.timeout_s,
            first_retry_s=self.first_wait_s,
            longest_retry_s=LONGEST_RETRY_S,
            retry_statuses=(*RETRY_STATUSES, 409, 500),
            token=resolve_secret(self.api_key, "api_key of the judge"),
        )
        try:
            return await client.post(path, {"messages": sent, **fields})
        except EngineError as error:
            raise JudgeFailed(
                f"the judge {self.model} at {self.base_url} failed {client.num_requests} "
                f"times, last with: {error.problem}",
                "check the endpoint, its key and its rate limits",
            ) from error
        finally:
            await client.close()
