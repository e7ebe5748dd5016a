"""A chat with any OpenAI endpoint, for evaluation. Its trace has no tokens.

Images are sent as data URLs, or as `media:` URLs to a Sightline server that reads the same store.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec

from sightline.envs.openai_messages import read_completion, to_openai_message
from sightline.envs.protocol import Messages
from sightline.errors import EngineError, RolloutTruncated
from sightline.media import MediaRef
from sightline.message import AssistantMessage, ImageResolver, Message, to_messages
from sightline.render import Tools
from sightline.rollout.model_chat import ModelChat
from sightline.transport.http_client import RetryingClient

RETRY_STATUSES = (408, 425, 429, 502, 503, 504)
FIRST_ANSWER_TIMEOUT_S = 10.0
"""How long to wait for the first answer before the address counts as wrong."""
TOO_LONG = "context_length_exceeded"
MAX_SEED = 1 << 31
"""Some endpoints do not accept larger seeds."""


@dataclass
class OpenAIClient(RetryingClient):
    """The client of one endpoint. `base_url` ends before `/chat/completions`."""

    model: str
    """Name of the model; empty until `choose_model` sets it."""
    _: KW_ONLY
    deadline_s: float = 120.0
    first_retry_s: float = 0.25
    longest_retry_s: float = 10.0
    retry_statuses: tuple[int, ...] = RETRY_STATUSES
    unreachable_fix: str = "check the address: it ends in /v1 on most servers"

    async def complete(
        self, messages: list[dict[str, Any]], tools: Tools | None, **sampling: Any
    ) -> dict[str, Any]:
        """Request a chat completion. `sampling` are fields of the request, such as temperature."""
        body = {"model": self.model, "messages": messages, **sampling}
        if tools:
            body["tools"] = list(tools)
        return await self._request_json("POST", "/chat/completions", msgspec.json.encode(body))

    async def choose_model(self, timeout_s: float = FIRST_ANSWER_TIMEOUT_S) -> None:
        """Wait until the endpoint answers, and choose its only model if none is named."""
        await self.wait_reachable("/models", timeout_s)
        if self.model:
            return
        listed = (await self._request_json("GET", "/models")).get("data") or []
        names = [str(model["id"]) for model in listed]
        if len(names) != 1:
            raise EngineError(
                f"{self.base_url} lists {len(names)} models: {', '.join(names[:8])}",
                "name the model to evaluate",
                kind="foreign",
            )
        self.model = names[0]

    async def _request_json(
        self, method: str, path: str, body: bytes | None = None
    ) -> dict[str, Any]:
        data = await self.request(method, path, body)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{self.base_url}{path} does not answer as an OpenAI endpoint: {error}",
                self.unreachable_fix,
                kind="foreign",
            ) from error

    def read_error(self, status: int, data: bytes) -> EngineError:
        text, code = data[:300].decode(errors="replace"), "foreign"
        try:
            error = msgspec.json.decode(data)["error"]
            text, code = str(error.get("message") or text), str(error.get("code") or code)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
            pass
        fix = self.unreachable_fix if status == 404 else "see the endpoint's docs"
        return EngineError(f"{self.base_url} answered {status}: {text}", fix, code, status)


@dataclass
class EndpointUsage:
    """A rollout's use of its endpoint. Branches share it."""

    num_calls: int = 0
    num_sampled_tokens: int = 0


@dataclass(kw_only=True)
class OpenAIChat(ModelChat):
    """One conversation. The environment's own agent calls the endpoint directly."""

    client: OpenAIClient
    resolver: ImageResolver
    shares_store: bool = False
    """Whether the endpoint reads the same store."""
    history: list[Message] = field(default_factory=list)
    num_context_tokens: int = 0
    usage: EndpointUsage = field(default_factory=EndpointUsage)

    @property
    def num_calls(self) -> int:
        return self.usage.num_calls

    @property
    def num_sampled_tokens(self) -> int:
        return self.usage.num_sampled_tokens

    async def messages(self, messages: Messages) -> list[Message]:
        await self.finish_writes()
        return await self.run_in_pool(lambda: to_messages(self.put_images(messages), self.resolver))

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return await self._complete([*self.history, *await self.messages(new_messages)], tools)

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return await self._complete(await self.messages(all_messages), tools)

    async def _complete(self, history: list[Message], tools: Tools | None) -> AssistantMessage:
        with self._begin_turn() as stage:
            self._check_turn_limit()
            sent = await self.run_in_pool(
                lambda: [to_openai_message(message, self._url_of) for message in history]
            )
            with stage.begin("generate", server=self.client.base_url):
                answer = await self._call(sent, tools)
        reply = read_completion(answer)
        usage = answer.get("usage") or {}
        self.num_context_tokens = int(usage.get("total_tokens") or 0)
        self.usage.num_sampled_tokens += int(usage.get("completion_tokens") or 0)
        self.history = [*history, reply.as_message()]
        self.calls.append(self.usage.num_calls)
        self.usage.num_calls += 1
        return reply

    async def _call(self, sent: list[dict[str, Any]], tools: Tools | None) -> dict[str, Any]:
        try:
            return await self.client.complete(
                sent,
                tools,
                seed=self._next_seed() % MAX_SEED,
                temperature=self.temperature,
                max_tokens=self.max_tokens,
            )
        except EngineError as error:
            if error.kind != TOO_LONG:
                raise
            fix = "send less, or serve with a larger max_model_len"
            self._truncate(RolloutTruncated(error.problem, fix))

    def _url_of(self, ref: MediaRef) -> str:
        return ref.url if self.shares_store else ref.data_url(self.store.get(ref))
