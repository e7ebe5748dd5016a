"""Builds the chats of rollouts, with the policy or with any OpenAI endpoint.

Threads, limits and images are the same for both, and the player knows neither.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from sightline.config import RunFile
from sightline.families import load_family, load_renderer
from sightline.media import ImageIngestor, MediaStore
from sightline.message import ImageResolver
from sightline.render import Renderer
from sightline.rollout.chat import RolloutChat
from sightline.rollout.client import GenerateClient
from sightline.rollout.engines import load_engine
from sightline.rollout.interception_server import InterceptionServer
from sightline.rollout.model_chat import AgentEndpoint, ModelChat
from sightline.rollout.openai_chat import OpenAIChat, OpenAIClient
from sightline.rollout.router import ServerRouter
from sightline.run.stages import Stage
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest


@dataclass(kw_only=True)
class ChatSource(ABC):
    """The state that the rollouts of a process share."""

    store: MediaStore
    max_tokens: int
    """Maximum number of tokens that a turn may sample."""
    max_turns: int = 0
    """Maximum number of model calls of a rollout; 0 for no limit."""
    resolver: ImageResolver | None = None
    """Resolves the images of messages; by default only data: and media: URLs."""

    def __post_init__(self) -> None:
        # Not the loop's default executor, where user code may hang.
        self._pool = ThreadPoolExecutor(thread_name_prefix="chat")
        self._resolver = self.resolver or ImageIngestor(self.store)

    @abstractmethod
    def build(self, request: RolloutRequest, trace: Trace, stage: Stage) -> ModelChat:
        """Return the chat of one rollout."""

    def serve_agent(self, chat: ModelChat) -> AbstractAsyncContextManager[None]:
        """Serve `chat.base_url` to the environment's own agent within this context."""
        return nullcontext()

    @property
    def memory_bytes(self) -> int:
        """Memory of running rollouts in addition to their chats."""
        return 0

    @property
    def wire_counts(self) -> dict[str, int]:
        """Requests and bytes since the start, to all servers and from all agents."""
        return {}

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _shared(self, request: RolloutRequest, trace: Trace, stage: Stage) -> dict[str, Any]:
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
            "stage": stage,
        }


@dataclass(kw_only=True)
class PolicyChats(ChatSource):
    """Chats that commit every token to the trace, for training and for evaluating checkpoints."""

    renderer: Renderer
    client: GenerateClient
    """The template of all clients."""
    modality: str
    servers: tuple[str, ...] = ()
    """Addresses of all servers; empty if `client` has the only one."""
    max_model_len: int = 0
    """Maximum length of prompt and answer; 0 if unknown."""
    added_token: str = field(default="", repr=False)
    """Token of servers that are added during the run."""
    own_token: str = field(default="", repr=False)
    """Token of servers that the run starts in addition to `servers`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interception = InterceptionServer(self._resolver)
        servers = self.servers or (self.client.base_url,)
        self.router = ServerRouter(self.client, servers, self.added_token, self.own_token)

    def build(self, request: RolloutRequest, trace: Trace, stage: Stage) -> RolloutChat:
        return RolloutChat(
            **self._shared(request, trace, stage),
            renderer=self.renderer,
            client=self.router.open_client(request.rollout_id, request.min_version, request.server),
            modality=self.modality,
            max_model_len=self.max_model_len,
        )

    def serve_agent(self, chat: ModelChat) -> AbstractAsyncContextManager[None]:
        assert isinstance(chat, RolloutChat)
        return self.interception.serve_rollout(chat)

    @property
    def memory_bytes(self) -> int:
        return self.interception.memory_bytes

    @property
    def wire_counts(self) -> dict[str, int]:
        total: Counter[str] = Counter(asdict(self.interception.counts))
        for client in self.router.clients:
            total.update(asdict(client.counts))
        return dict(total)

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

    def build(self, request: RolloutRequest, trace: Trace, stage: Stage) -> OpenAIChat:
        return OpenAIChat(
            **self._shared(request, trace, stage),
            client=self.client,
            resolver=self._resolver,
            shares_store=self.shares_store,
            agent_endpoint=AgentEndpoint(self.client.token or "none", lambda: self.client.base_url),
        )

    async def close(self) -> None:
        await self.client.close()
        await super().close()


def build_policy_chats(
    config: RunFile, servers: Sequence[str], store: MediaStore, own_token: str = ""
) -> PolicyChats:
    """Build the chats of a run file, for workers and for `sightline eval`."""
    model, media, inference = config.model, config.media, config.inference
    family = load_family(model.path, **model.overrides())
    resolver = ImageIngestor(store, media.file_roots, media.http_hosts)
    renderer = load_renderer(
        model.path, store, family, resolver, model.number_images, inference.max_model_len
    )
    client = load_engine(inference.engine).build_client(
        servers[0],
        settings=family.settings,
        token=inference.read_token(own_token),
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
        servers=tuple(servers),
        max_model_len=inference.max_model_len,
        added_token=inference.read_added_token(),
        own_token=own_token,
    )
