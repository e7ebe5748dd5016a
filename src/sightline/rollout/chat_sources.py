"""Build the chats of rollouts, with the policy or with any OpenAI endpoint.

Both kinds share threads, limits and image handling, so the player treats them alike.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from sightline.config import RunFile
from sightline.envs.openai_endpoint import OpenAIClient, read_completion
from sightline.envs.protocol import Messages
from sightline.errors import EngineError, RolloutTruncated
from sightline.families import load_family, load_renderer
from sightline.media import ImageIngestor, MediaRef, MediaStore
from sightline.message import (
    AssistantMessage,
    ImageResolver,
    Message,
    to_messages,
    to_openai_message,
)
from sightline.render import Renderer, Tools
from sightline.rollout.chat import RolloutChat
from sightline.rollout.client import GenerateClient
from sightline.rollout.engines import load_engine
from sightline.rollout.interception_server import InterceptionServer
from sightline.rollout.model_chat import ModelChat
from sightline.rollout.router import ServerRouter
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest


@dataclass(kw_only=True)
class ChatSource(ABC):
    """Builds chats, and holds the state that all rollouts of a process share."""

    store: MediaStore
    max_tokens: int
    """Maximum number of tokens that a turn may sample."""
    max_turns: int = 0
    """Maximum number of model calls per rollout; 0 for no limit."""
    resolver: ImageResolver | None = None
    """Resolves image URLs in messages. The default supports only data: and media: URLs."""

    def __post_init__(self) -> None:
        # Do not use the loop's default executor: user code may block its threads.
        self._pool = ThreadPoolExecutor(thread_name_prefix="chat")
        self._resolver = self.resolver or ImageIngestor(self.store)

    @abstractmethod
    def build(self, request: RolloutRequest, trace: Trace) -> ModelChat:
        """Return the chat of one rollout."""

    def serve_agent(self, chat: ModelChat) -> AbstractAsyncContextManager[None]:
        """Serve `chat.base_url` to the environment's own agent within this context."""
        return nullcontext()

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _shared(self, request: RolloutRequest, trace: Trace) -> dict[str, Any]:
        return {
            "trace": trace,
            "store": self.store,
            "rng": random.Random(request.seed),
            "seed": request.seed,
            "temperature": request.temperature,
            "max_tokens": self.max_tokens,
            "max_turns": self.max_turns,
            "swapped_images": request.exchanged,
            "pool": self._pool,
        }


@dataclass(kw_only=True)
class PolicyChats(ChatSource):
    """Chats that commit every token to the trace, for training and for evaluating checkpoints."""

    renderer: Renderer
    client: GenerateClient
    """Template for the client of each server."""
    modality: str
    asks_for_routes: bool = False
    servers: tuple[str, ...] = ()
    """Addresses of all servers. Empty to use only the server of `client`."""
    max_model_len: int = 0
    """Maximum length of prompt and answer; 0 if unknown."""
    added_token: str = field(default="", repr=False)
    """Token for servers that are added during the run."""
    own_token: str = field(default="", repr=False)
    """Token for servers that the run starts in addition to `servers`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interception = InterceptionServer(self._resolver)
        servers = self.servers or (self.client.base_url,)
        self.router = ServerRouter(self.client, servers, self.added_token, self.own_token)

    def build(self, request: RolloutRequest, trace: Trace) -> RolloutChat:
        return RolloutChat(
            **self._shared(request, trace),
            renderer=self.renderer,
            client=self.router.open_client(request.rollout_id, request.min_version, request.server),
            modality=self.modality,
            max_model_len=self.max_model_len,
            asks_for_routes=self.asks_for_routes,
        )

    def serve_agent(self, chat: ModelChat) -> AbstractAsyncContextManager[None]:
        assert isinstance(chat, RolloutChat)
        return self.interception.serve_rollout(chat)

    async def close(self) -> None:
        await self.interception.close()
        await self.router.close()
        await self.client.close()
        await super().close()


@dataclass(kw_only=True)
class OpenAIChats(ChatSource):
    """Chats with an OpenAI endpoint, for evaluation. They commit no tokens to the trace."""

    client: OpenAIClient
    shares_store: bool = False
    """Whether the endpoint reads the same store."""

    def build(self, request: RolloutRequest, trace: Trace) -> OpenAIChat:
        return OpenAIChat(
            **self._shared(request, trace),
            client=self.client,
            resolver=self._resolver,
            shares_store=self.shares_store,
            base_url=self.client.base_url,
            api_key=self.client.token or "none",
        )

    async def close(self) -> None:
        await self.client.close()
        await super().close()


def build_policy_chats(
    config: RunFile, servers: Sequence[str], store: MediaStore, own_token: str = ""
) -> PolicyChats:
    """Build the chat source for a run file. Workers and `sightline eval` use it."""
    model, media, inference = config.model, config.media, config.inference
    family = load_family(model.path, **model.overrides())
    resolver = ImageIngestor(store, media.file_roots, media.http_hosts)
    renderer = load_renderer(model.path, store, family, resolver, inference.max_model_len)
    engine = load_engine(inference.engine)
    client = engine.build_client(
        servers[0],
        settings=family.settings,
        token=inference.read_token() if inference.servers else own_token,
        vocab_size=renderer.vocab_size,
        banned_token_ids=renderer.pad_token_ids,
        max_model_len=inference.max_model_len,
    )
    return PolicyChats(
        store=store,
        max_tokens=config.rollout.max_tokens,
        max_turns=config.rollout.max_turns,
        resolver=resolver,
        renderer=renderer,
        client=client,
        modality=family.modality,
        asks_for_routes=engine.reports_routes,
        servers=tuple(servers),
        max_model_len=inference.max_model_len,
        added_token=inference.read_token(),
        own_token=own_token,
    )


TOO_LONG = "context_length_exceeded"
MAX_SEED = 1 << 31
"""Exclusive upper bound for seeds. Some endpoints do not accept larger ones."""


@dataclass(kw_only=True)
class OpenAIChat(ModelChat):
    """One conversation. The environment's own agent calls the endpoint directly."""

    client: OpenAIClient
    resolver: ImageResolver
    shares_store: bool = False
    """Whether the endpoint reads the same store."""
    history: list[Message] = field(default_factory=list)
    num_context_tokens: int = 0
    num_sampled: list[int] = field(default_factory=list)
    """Number of sampled tokens of each call, shared by all branches."""

    @property
    def num_calls(self) -> int:
        return len(self.num_sampled)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.num_sampled)

    async def messages(self, messages: Messages) -> list[Message]:
        await self.finish_writes()
        return await self.run_in_pool(lambda: to_messages(self.put_images(messages), self.resolver))

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return await self._complete([*self.history, *await self.messages(new_messages)], tools)

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return await self._complete(await self.messages(all_messages), tools)

    async def _complete(self, history: list[Message], tools: Tools | None) -> AssistantMessage:
        self._check_running()
        self._check_turn_limit()
        earlier = list(self.truncations)
        sent = await self.run_in_pool(
            lambda: [to_openai_message(message, self._url_of) for message in history]
        )
        answer = await self._call(sent, tools)
        reply = read_completion(answer)
        usage = answer.get("usage") or {}
        self.num_context_tokens = int(usage.get("total_tokens") or 0)
        self.history = [*history, reply.as_message()]
        self.calls.append(self.num_calls)
        self.clear_truncations(earlier)
        self.num_sampled.append(int(usage.get("completion_tokens") or 0))
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
            self.truncate(RolloutTruncated(error.problem, fix))

    def _url_of(self, ref: MediaRef) -> str:
        return ref.url if self.shares_store else ref.data_url(self.store.get(ref))
