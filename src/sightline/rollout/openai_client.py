"""A chat with a model behind any OpenAI endpoint, for evaluation: nothing here trains.

Images are kept in a store and sent as data URLs; as `media:` urls to an endpoint of ours that
reads the same store.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from sightline.envs.protocol import Messages
from sightline.errors import EngineError, RolloutTruncated
from sightline.media import ImageIngestor, MediaRef, MediaStore
from sightline.message import AssistantMessage, Message, to_messages
from sightline.render import Tools
from sightline.rollout.openai_api.client_messages import read_completion, to_openai_message

RETRY_STATUSES = (408, 425, 429, 502, 503, 504)
TOO_LONG = "context_length_exceeded"
_FIRST_RETRY_S = 0.25
_LONGEST_RETRY_S = 10.0
FIRST_ANSWER_S = 10.0
"""An address at which nothing answers for so long at the start is taken for a wrong one."""


@dataclass
class OpenAIClient:
    """`base_url` ends where `/chat/completions` begins. One per process."""

    base_url: str
    model: str
    api_key: str = "none"
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sent with every request: temperature, max_tokens."""
    deadline_s: float = 120.0
    """Bounds retries, not an answer that is under way."""

    def __post_init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False

    async def wait_reachable(self) -> None:
        """Returns when something answers, whatever it says; raises where nothing does."""
        give_up = time.monotonic() + FIRST_ANSWER_S
        while True:
            found = await self._try("GET", "/models", None)
            if self._has_answered:
                return
            if isinstance(found, EngineError) and time.monotonic() > give_up:
                raise found
            await asyncio.sleep(_FIRST_RETRY_S)

    async def complete(
        self, messages: list[dict[str, Any]], tools: Tools | None, seed: int
    ) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "seed": seed, **self.sampling}
        if tools:
            body["tools"] = list(tools)
        return await self._call("POST", "/chat/completions", msgspec.json.encode(body))

    async def models(self) -> list[str]:
        found = await self._call("GET", "/models")
        return [str(model["id"]) for model in found.get("data", [])]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        give_up = time.monotonic() + self.deadline_s
        wait_s = _FIRST_RETRY_S
        while True:
            found = await self._try(method, path, body)
            if isinstance(found, dict):
                return found
            pause_s = wait_s * (0.75 + 0.5 * random.random())
            if found.status not in RETRY_STATUSES or time.monotonic() + pause_s > give_up:
                raise found
            await asyncio.sleep(pause_s)
            wait_s = min(wait_s * 2, _LONGEST_RETRY_S)

    async def _try(
        self, method: str, path: str, body: bytes | None
    ) -> dict[str, Any] | EngineError:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                headers={"authorization": f"Bearer {self.api_key}"},
            )
        url = self.base_url.rstrip("/") + path
        headers = {"content-type": "application/json"}
        try:
            async with self._session.request(method, url, data=body, headers=headers) as answer:
                self._has_answered = True
                data = await answer.read()
                if answer.status == 200:
                    decoded: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
                    return decoded
                return _read_error(answer.status, data)
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            return EngineError(
                f"{url} does not answer as an OpenAI endpoint: {error}",
                "check the address: it ends in /v1 on most servers",
                kind="unreachable",
                status=503,
            )


def _read_error(status: int, data: bytes) -> EngineError:
    text, code = data[:300].decode(errors="replace"), "foreign"
    try:
        said = msgspec.json.decode(data)["error"]
        text, code = str(said.get("message") or text), str(said.get("code") or code)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        pass
    return EngineError(
        f"the endpoint answered {status}: {text}", "see the endpoint's docs", code, status
    )


@dataclass
class OpenAIChat:
    """One conversation; a `Chat` as environments see it."""

    endpoint: OpenAIClient
    store: MediaStore
    rng: random.Random
    seed: int
    shares_store: bool = False
    """Whether the endpoint reads the same store."""
    history: list[Message] = field(default_factory=list)
    num_context_tokens: int = 0
    calls: list[int] = field(default_factory=list)
    truncations: list[str] = field(default_factory=list)
    """Why the rollout was cut short; branches share it, and the counts."""
    counted: dict[str, int] = field(default_factory=lambda: {"calls": 0, "tokens": 0})

    def __post_init__(self) -> None:
        self._resolver = ImageIngestor(self.store)

    @property
    def base_url(self) -> str:
        return self.endpoint.base_url

    @property
    def api_key(self) -> str:
        return self.endpoint.api_key

    @property
    def num_calls(self) -> int:
        return self.counted["calls"]

    def branch(self) -> OpenAIChat:
        other = copy.copy(self)
        other.history, other.calls = list(self.history), []
        other.seed = self.rng.getrandbits(31)
        other.rng = random.Random(other.seed)
        return other

    def put(self, image: Any) -> MediaRef:
        return self.store.put(image)

    def get(self, ref: MediaRef) -> bytes:
        return self.store.get(ref)

    async def messages(self, messages: Messages) -> list[Message]:
        return await asyncio.to_thread(to_messages, messages, self._resolver)

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return await self._complete([*self.history, *await self.messages(new_messages)], tools)

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return await self._complete(await self.messages(all_messages), tools)

    async def _complete(self, history: list[Message], tools: Tools | None) -> AssistantMessage:
        sent = await asyncio.to_thread(
            lambda: [to_openai_message(m, self._url_of) for m in history]
        )
        number = self.counted["calls"]
        self.counted["calls"] += 1
        try:
            answer = await self.endpoint.complete(sent, tools, (self.seed + number) % (1 << 31))
        except EngineError as error:
            if error.kind == TOO_LONG:
                self.truncations.append(error.problem)
                raise RolloutTruncated(
                    error.problem, "show less, or serve with a larger max_len"
                ) from error
            raise
        heard = read_completion(answer)
        usage = answer.get("usage") or {}
        self.num_context_tokens = int(usage.get("total_tokens") or 0)
        self.counted["tokens"] += int(usage.get("completion_tokens") or 0)
        self.history = [*history, heard.as_message()]
        self.calls.append(number)
        return heard

    def _url_of(self, ref: MediaRef) -> str:
        if self.shares_store:
            return ref.url
        return f"data:{ref.mime};base64,{base64.b64encode(self.store.get(ref)).decode()}"
