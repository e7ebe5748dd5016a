"""Base class for chats: seeds, images and limits."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Self, TypeVar

from sightline.errors import RolloutTruncated, SightlineError, TurnLimitReached
from sightline.media import MediaRef, MediaStore
from sightline.message import put_images
from sightline.trace import Trace

T = TypeVar("T")

MAX_REFUSAL_CHARS = 500
"""Maximum length of an error message in the trace, in characters."""


@dataclass(kw_only=True)
class ModelChat(ABC):
    """One conversation of a rollout. Its branches share the trace."""

    trace: Trace
    store: MediaStore
    rng: random.Random
    seed: int
    temperature: float
    max_tokens: int
    pool: Executor
    """Threads for rendering and for store access. User code never runs in them."""
    max_turns: int = 0
    """Maximum number of model calls; 0 for no limit."""
    swapped_images: tuple[MediaRef, ...] = ()
    """Images that replace, in order, the images that the environment puts."""
    base_url: str = ""
    """Base URL of the rollout's model, for the environment's own agent."""
    api_key: str = field(default="", repr=False)
    failures: list[SightlineError] = field(default_factory=list)
    """Endpoint or server failures, shared by all branches. They drop the rollout even if the
    agent or the environment handles them."""
    swap_places: Iterator[int] = field(default_factory=itertools.count)
    """Counts the swapped images that were handed out, in all branches."""
    writes: list[Future[str]] = field(default_factory=list)
    """Pending writes of images to the store, shared by all branches."""
    substitutes: dict[str, MediaRef] = field(default_factory=dict)
    """The replacement of each image that an agent sent, by digest."""
    num_turns: int = 0
    """Number of model calls on the path to this point, including those before the branch."""
    truncations: list[RolloutTruncated] = field(default_factory=list)
    """Limits that the last calls exceeded, shared by all branches. A later answer clears them."""
    calls: list[int] = field(default_factory=list)
    """Indices of the model calls that this handle made, within the rollout."""
    num_branches: int = 0
    _substitutes_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def uncertainty(self) -> float:
        """Mean negative logprob of the last answer's tokens; 0 if the endpoint gives none."""
        return 0.0

    @property
    @abstractmethod
    def num_calls(self) -> int:
        """Number of answered model calls in the whole rollout."""

    @property
    @abstractmethod
    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens in the whole rollout."""

    def branch(self) -> Self:
        """Return a second chat on the same trace that continues from this point.

        It has its own seeds, so that concurrent branches sample the same tokens in any order.
        """
        self.num_branches += 1
        name = f"{self.seed}/{self.num_turns}/{self.num_branches}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
        return replace(self, seed=seed, rng=random.Random(seed), calls=[], num_branches=0)

    async def run_in_pool(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)

    def put(self, image: Any) -> MediaRef:
        if self.swapped_images:
            return self._next_swapped_image()
        ref, data = self.store.identify(image)
        self.writes.append(self.pool.submit(self.store.put_bytes, data, ref.digest))
        return ref

    def put_images(self, messages: Any) -> Any:
        """Replace each image in the messages by its ref. Blocks, so call this in a thread."""

        def put(image: Any) -> MediaRef:
            return self._next_swapped_image() if self.swapped_images else self.store.put(image)

        return put_images(messages, put)

    def _next_swapped_image(self) -> MediaRef:
        return self.swapped_images[next(self.swap_places) % len(self.swapped_images)]

    async def finish_writes(self) -> None:
        """Wait until the store holds every image that was put. Raise if a write failed."""
        while self.writes:
            write = self.writes[0]
            try:
                # Shield the write: if this send is cancelled, a branch may still need the image.
                await asyncio.shield(asyncio.wrap_future(write))
            finally:
                if write.done() and write in self.writes:
                    self.writes.remove(write)

    def get(self, ref: MediaRef) -> bytes:
        for write in list(self.writes):
            write.result()
        return self.store.get(ref)

    @property
    def truncated(self) -> str:
        """Reason for truncating the rollout. Empty if it was not truncated."""
        return self.truncations[0].problem if self.truncations else ""

    def substitute_image(self, url: str, ref: MediaRef) -> MediaRef:
        """Return the replacement for an image that an agent sent. Thread-safe.

        An agent repeats its history in every request, so an image keeps its replacement.
        """
        if not self.swapped_images or (url.startswith("media:") and ref in self.swapped_images):
            return ref
        with self._substitutes_lock:
            if ref.digest not in self.substitutes:
                self.substitutes[ref.digest] = self._next_swapped_image()
            return self.substitutes[ref.digest]

    def record_refusal(self, error: SightlineError) -> None:
        """Record in the trace that a message or an agent's request was refused."""
        text = f"{type(error).__name__}: {error.problem}"
        self.trace.refused_requests.append(text[:MAX_REFUSAL_CHARS])

    def _check_running(self) -> None:
        if self.trace.ended:
            # Not a subclass of Exception, because user code may catch those and never end.
            raise asyncio.CancelledError("the rollout is over")

    def _next_seed(self) -> int:
        """Return the turn's seed. It does not depend on concurrent rollouts."""
        seed = (self.seed * 1_000_003 + self.num_turns) % (1 << 62)
        self.num_turns += 1
        return seed

    def _check_turn_limit(self, num_answers: int = 1) -> None:
        """Truncate a rollout that would exceed its turn limit."""
        if 0 < self.max_turns < self.num_calls + num_answers:
            self.truncate(
                TurnLimitReached(
                    f"the rollout reached its turn limit, [rollout] max_turns = {self.max_turns}",
                    "end the rollout sooner, or raise max_turns",
                )
            )

    def truncate(self, error: RolloutTruncated) -> NoReturn:
        """Refuse a call that exceeds a limit. The rollout is truncated unless a later call fits."""
        self.truncations.append(error)
        raise error

    def clear_truncations(self, earlier: Sequence[RolloutTruncated]) -> None:
        """Drop limits that were exceeded before a call that was answered."""
        self.truncations[:] = [error for error in self.truncations if error not in earlier]
