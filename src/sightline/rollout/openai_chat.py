"""A chat with a model behind any OpenAI endpoint, for evaluation: its trace has no tokens.

Images are kept in a store and sent as data URLs; as `media:` urls to an endpoint of ours that
reads the same store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sightline.envs.openai_messages import read_completion, to_openai_message
from sightline.envs.protocol import Messages
from sightline.errors import EngineError, RolloutTruncated
from sightline.media import MediaRef
from sightline.message import AssistantMessage, ImageResolver, Message, to_messages
from sightline.render import Tools
from sightline.rollout.model_chat import ModelChat
from sightline.rollout.openai_client import OpenAIClient
from sightline.rollout.put_pool import unwrap_refs

TOO_LONG = "context_length_exceeded"
MAX_SEED = 1 << 31
"""Some endpoints take no larger ones."""


@dataclass
class EndpointUsage:
    """What a rollout has asked of its endpoint; its branches share it."""

    num_calls: int = 0
    num_sampled_tokens: int = 0


@dataclass(kw_only=True)
class OpenAIChat(ModelChat):
    """One conversation; an agent of the environment's own is sent to the endpoint itself."""

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
        await self.pending.settle()
        return await self.run_in_pool(to_messages, unwrap_refs(messages), self.resolver)

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
        heard = read_completion(answer)
        usage = answer.get("usage") or {}
        self.num_context_tokens = int(usage.get("total_tokens") or 0)
        self.usage.num_sampled_tokens += int(usage.get("completion_tokens") or 0)
        self.history = [*history, heard.as_message()]
        self.calls.append(self.usage.num_calls)
        self.usage.num_calls += 1
        return heard

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
            fix = "show less, or serve with a larger max_model_len"
            self._truncate(RolloutTruncated(error.problem, fix))

    def _url_of(self, ref: MediaRef) -> str:
        return ref.url if self.shares_store else ref.data_url(self.store.get(ref))
