"""What every chat of a rollout has, whoever samples: seeds, images, limits, stages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Self, TypeVar

from sightline.errors import (
    EnvironmentFailed,
    RolloutTruncated,
    SightlineError,
    TurnLimitReached,
)
from sightline.media import MediaRef, MediaStore
from sightline.message import put_images
from sightline.run.stages import NO_STAGE, Stage
from sightline.trace import Trace

T = TypeVar("T")

MAX_REFUSAL_CHARS = 500
"""Characters of a refusal that the trace keeps."""
TRACE_BYTES_PER_TOKEN = 48
"""Memory of a rollout for each token of its trace, an estimate that bounds rollouts in flight."""


@dataclass(frozen=True)
class AgentEndpoint:
    """Where an agent of the environment's own finds the model of one rollout."""

    api_key: str
    open_base_url: Callable[[], str]
    """The address, which listens from the first call on."""


@dataclass(kw_only=True)
class ModelChat(ABC):
    """One conversation of a rollout. Branches of it share the trace and what is counted there."""

    trace: Trace
    store: MediaStore
    rng: random.Random
    seed: int
    temperature: float
    max_tokens: int
    pool: Executor
    """Threads for rendering and for the store; user code never runs in them."""
    max_turns: int = 0
    """Model calls that the rollout may make; 0 is any number."""
    swapped_images: tuple[MediaRef, ...] = ()
    """Images that are shown in place of those that are put, in order."""
    agent_endpoint: AgentEndpoint | None = None
    failures: list[SightlineError] = field(default_factory=list)
    """What broke a promise of the endpoint or of the server; whatever an agent or an environment
    makes of it, the rollout is dropped. Branches share it."""
    num_put: int = 0
    writes: list[Future[str]] = field(default_factory=list)
    """Images on their way into the store; branches share the list."""
    substitutes: dict[str, MediaRef] = field(default_factory=dict)
    """By the digest of an agent's own image, the one that is shown for it."""
    num_turns: int = 0
    """Model calls that were begun on the way to this point, those of the stem included."""
    truncations: list[RolloutTruncated] = field(default_factory=list)
    """Why the rollout was cut short; branches share it."""
    calls: list[int] = field(default_factory=list)
    """Which of the rollout's model calls, counted from 0, went through this handle."""
    num_branches: int = 0
    stage: Stage = NO_STAGE
    """The rollout's stage, which holds those of its turns."""
    environment_began: float | None = field(default_factory=time.time)
    """When the environment's turn to act began; None while an answer is awaited."""
    _substitutes_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    @abstractmethod
    def num_calls(self) -> int:
        """Model calls of the whole rollout that were answered."""

    @property
    @abstractmethod
    def num_sampled_tokens(self) -> int:
        """Tokens that the whole rollout has sampled."""

    def branch(self) -> Self:
        """A second handle on the trace, which goes on from where this one is.

        It draws from seeds of its own, so that branches that run side by side say the same in
        whatever order the server answers them.
        """
        self.num_branches += 1
        name = f"{self.seed}/{self.num_turns}/{self.num_branches}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
        return replace(
            self,
            seed=seed,
            rng=random.Random(seed),
            calls=[],
            num_branches=0,
            environment_began=time.time(),
        )

    async def run_in_pool(self, work: Callable[..., T], *args: Any) -> T:
        """Does in a thread what would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)

    def put(self, image: Any) -> MediaRef:
        if self.swapped_images:
            return self._next_swapped_image()
        ref, data = self.store.identify(image)
        self.writes.append(self.pool.submit(self.store.put_bytes, data, ref.digest))
        return ref

    def put_images(self, messages: Any) -> Any:
        """Return the messages with a ref for each image in them; call it in a thread."""

        def put(image: Any) -> MediaRef:
            return self._next_swapped_image() if self.swapped_images else self.store.put(image)

        return put_images(messages, put)

    def _next_swapped_image(self) -> MediaRef:
        self.num_put += 1
        return self.swapped_images[(self.num_put - 1) % len(self.swapped_images)]

    async def finish_writes(self) -> None:
        """Wait until the store holds every image that was put; raise if a write failed."""
        while self.writes:
            write = self.writes[0]
            try:
                # Shielded: if this send is cancelled, a branch may still need the image.
                await asyncio.shield(asyncio.wrap_future(write))
            finally:
                if write.done() and write in self.writes:
                    self.writes.remove(write)

    def get(self, ref: MediaRef) -> bytes:
        for write in list(self.writes):
            write.result()
        return self.store.get(ref)

    @property
    def memory_bytes(self) -> int:
        """What the rollout takes in memory."""
        return self.trace.num_tokens * TRACE_BYTES_PER_TOKEN

    @property
    def truncated(self) -> str:
        """Why the rollout was cut short; empty while it was not."""
        return self.truncations[0].problem if self.truncations else ""

    @property
    def base_url(self) -> str:
        return self._get_agent_endpoint().open_base_url()

    @property
    def api_key(self) -> str:
        return self._get_agent_endpoint().api_key

    def _get_agent_endpoint(self) -> AgentEndpoint:
        if self.agent_endpoint is None:
            raise EnvironmentFailed(
                "this chat has no endpoint",
                "play the environment with sightline.rollout.player.RolloutPlayer",
            )
        return self.agent_endpoint

    def substitute_image(self, url: str, ref: MediaRef) -> MediaRef:
        """What is shown for an image that an agent sent, in any thread.

        An agent sends its history again with every request, so that an image keeps its stand-in.
        """
        if not self.swapped_images or (url.startswith("media:") and ref in self.swapped_images):
            return ref
        with self._substitutes_lock:
            if ref.digest not in self.substitutes:
                self.substitutes[ref.digest] = self._next_swapped_image()
            return self.substitutes[ref.digest]

    def record_refusal(self, error: SightlineError) -> None:
        """Keeps on the trace that a message, or a request of an agent, was not taken."""
        self.trace.refused_requests.append(
            f"{type(error).__name__}: {error.problem}"[:MAX_REFUSAL_CHARS]
        )

    @contextlib.contextmanager
    def _begin_turn(self) -> Iterator[Stage]:
        if self.trace.ended:
            # No Exception: user code that goes on after any of those would never end.
            raise asyncio.CancelledError("the rollout is over")
        self.end_environment_stage()
        with self.stage.begin("turn", turn=self.num_turns + 1) as stage:
            try:
                yield stage
            finally:
                self.environment_began = time.time()

    def end_environment_stage(self) -> None:
        """The environment has acted: it asks, or it is done."""
        if self.environment_began is not None:
            self.stage.add_finished(
                "environment", self.environment_began, time.time(), after_turn=self.num_turns
            )
            self.environment_began = None

    def _next_seed(self) -> int:
        """A seed of its own for every turn makes a rollout the same whatever runs beside it."""
        seed = (self.seed * 1_000_003 + self.num_turns) % (1 << 62)
        self.num_turns += 1
        return seed

    def _check_turn_limit(self) -> None:
        """Ends a rollout that has used up its turns, before it makes another call."""
        if 0 < self.max_turns <= self.num_calls:
            self._truncate(
                TurnLimitReached(
                    "the rollout is cut short: its turns are used up, "
                    f"[rollout] max_turns = {self.max_turns}",
                    "end the rollout sooner, or raise the limit",
                )
            )
        if self.truncations:
            self._truncate(self.truncations[0])

    def _truncate(self, error: RolloutTruncated) -> NoReturn:
        """Cuts the rollout short; what did so first is raised again, whatever is asked later."""
        self.truncations.append(error)
        first = self.truncations[0]
        raise type(first)(first.problem, first.fix)
