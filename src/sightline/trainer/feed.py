"""Makes batches ready ahead of the loop: read, materialize, verify, pack.

    orchestrator --announcement--> prefetcher (own thread) --ready batch--> loop
      waits for: an announcement, then pixels        waits for: a ready batch
      unblocked by: the orchestrator, the pool       unblocked by: the prefetcher

Media are read and verified before packing, so that a bad image costs exactly the samples that
show it and the packs are those of the batch without them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from msgspec.structs import replace as replace_fields

from sightline.algo.aggregation import AggregationFunction, by_tokens
from sightline.errors import MediaError, Misaligned, WireError
from sightline.families import Family
from sightline.pack import PackSize, pack, truncate
from sightline.pixels import Materializer, Pixels
from sightline.trainer.bad_media import (
    BadMediaError,
    BadMediaPolicy,
    DroppedSample,
    MadePixels,
    MediaProblems,
    add_location,
    count_reasons,
)
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire import MediaItem
from sightline.wire.control import BatchReady
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.sample import Batch, digest_batch

StackPatches = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Copies the patches of a micro-batch's images one after the other into memory of its own."""


@dataclass(frozen=True, slots=True)
class ReadyMicroBatch:
    batch: MicroBatch
    patches: UInt8[np.ndarray, "patches values"] | None
    """Patches of the distinct images, in their order; None when there is none."""
    runs_tower: bool = False
    """Whether some rank shows an image in this round: then this one goes through the tower too."""
    has_stored_pixels: bool = True
    """Whether the patches are those of the items; a probe exchanges them."""

    @property
    def patch_starts(self) -> Int[np.ndarray, " starts"]:
        """Where in `patches` each image begins; last, how many patches there are."""
        return np.cumsum([0, *(entry.item.num_patches for entry in self.batch.items)])


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    step: int
    digest: str
    micro_batches: list[ReadyMicroBatch]
    materialize_s: float
    """Seconds that reading and making the pixels took."""
    num_samples: int = 0
    """Samples of the batch; this and the counts below are known to rank 0 alone."""
    num_slots: int = 0
    """Images that the samples show, as often as they show them."""
    num_images: int = 0
    """Distinct images of the samples."""
    dropped: list[DroppedSample] = field(default_factory=list)
    """Samples that bad media cost."""
    truncated: dict[str, int] = field(default_factory=dict)
    """Samples beyond `[trainer] max_sequence_tokens`: cut, or left out and why."""
    held_out: bool = False
    """Whether the batch is evaluated, and nothing is learnt from it."""
    is_last: bool = False
    """Whether the evaluation ends with this batch."""
    waited_s: float = 0.0
    """How long the loop waited for the batch."""
    num_unproven: int = 0
    """Samples that train although their sampler gave no digest of its pixels."""
    num_made: int = 0
    """Distinct images that were materialized for the batch; the others came from the cache."""

    @property
    def bad(self) -> dict[str, int]:
        """Samples that bad media cost, by reason."""
        return count_reasons(self.dropped)


@dataclass
class BatchPreparer:
    family: Family
    materializer: Materializer
    limit: PackSize
    bad_media: BadMediaPolicy = BadMediaPolicy()
    aggregation: AggregationFunction = by_tokens
    max_sequence_tokens: int = 0
    """Longest sample that trains uncut; 0 is any length."""
    stack: StackPatches = np.concatenate

    def prepare(self, batch: Batch, digest: str, lost: Sequence[DroppedSample] = ()) -> ReadyBatch:
        """`lost` are samples that bad media has already cost; they count with the others."""
        truncated: dict[str, int] = {}
        if self.max_sequence_tokens:
            fitting, counts = truncate(batch.samples, self.max_sequence_tokens)
            batch, truncated = Batch(batch.step, fitting), dict(counts)
        began = time.monotonic()
        made_before = self.materializer.counts.made
        made, problems = self._materialize(batch)
        store = self.materializer.store
        kept, dropped = self.bad_media.filter_samples(batch, made, problems, store, lost)
        spent = time.monotonic() - began
        packs = pack(kept, batch.step, self.family, self.limit, self.aggregation)
        return ReadyBatch(
            step=batch.step,
            digest=digest,
            micro_batches=[_attach_pixels(packed, made, self.stack) for packed in packs],
            materialize_s=spent,
            num_samples=len(kept),
            num_slots=sum(len(sample.slots) for sample in kept),
            num_images=len({item.key for sample in kept for item in sample.items}),
            dropped=dropped,
            truncated=truncated,
            num_unproven=sum(any(s.pixel_digest is None for s in one.slots) for one in kept),
            num_made=self.materializer.counts.made - made_before,
        )

    def _materialize(self, batch: Batch) -> tuple[MadePixels, MediaProblems]:
        # By the whole item: one that lies about its image fails alone.
        wanted = {item: sample for sample in batch.samples for item in sample.items}
        flights: dict[MediaItem, Future[Pixels]] = {}
        made: dict[MediaItem, Pixels] = {}
        problems: dict[MediaItem, BadMediaError] = {}
        for item in wanted:
            try:
                flights[item] = self.materializer.submit(item)
            except Misaligned as error:
                problems[item] = error
        for item, flight in flights.items():
            try:
                made[item] = flight.result()
            except MediaError as error:
                if isinstance(error.__cause__, OSError):
                    # A disk that fails may heal; a replay would then train on other samples.
                    store, sample = self.materializer.store, wanted[item]
                    raise add_location(error, sample.trace_id, batch.step, item, store) from error
                problems[item] = error
        return made, problems


def _attach_pixels(packed: MicroBatch, made: MadePixels, stack: StackPatches) -> ReadyMicroBatch:
    """With its pixels, and the digests that every other process has to come to."""
    if not packed.items:
        return ReadyMicroBatch(packed, None)
    items = [replace_fields(e, pixel_digest=made[e.item].digest) for e in packed.items]
    patches = stack([made[entry.item].patches for entry in items])
    return ReadyMicroBatch(replace_fields(packed, items=items), patches)


class BatchPrefetcher:
    """Iterates over batches that a thread makes ready, one ahead of the loop.

    The thread starts with the iteration, and waits while the batch ahead is not taken.
    """

    def __init__(self, batches: Iterable[ReadyBatch]) -> None:
        self._batches = batches
        self._ready: queue.Queue[ReadyBatch | BaseException | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[ReadyBatch]:
        threading.Thread(target=self._run, daemon=True, name="feed").start()
        while True:
            began = time.monotonic()
            ready = self._ready.get()
            if self._error is not None:
                raise self._error
            if isinstance(ready, BaseException):
                raise ready
            if ready is None:
                return
            yield replace(ready, waited_s=time.monotonic() - began)

    def fail(self, error: BaseException) -> None:
        """Raises `error` where the loop asks for its next batch, or waits for one. Never waits."""
        self._error = error
        with contextlib.suppress(queue.Full):  # then there is something to wake up for already
            self._ready.put_nowait(error)

    def _run(self) -> None:
        try:
            for ready in self._batches:
                self._ready.put(ready)
            self._ready.put(None)
        except BaseException as error:  # the loop raises it again, in the main thread
            self._ready.put(error)


@dataclass
class AnnouncedBatches:
    """Iterates over the batches that the orchestrator announces, made ready, in step order."""

    announcements: Callable[[], BatchReady | None]
    preparer: BatchPreparer
    next_step: int
    watchdog: StallWatchdog = field(default_factory=StallWatchdog)
    """Watches the thread that iterates: the loop's own is idle while it waits for a batch."""

    def __iter__(self) -> Iterator[ReadyBatch]:
        while (announced := self.announcements()) is not None:
            self.watchdog.enter(f"preparing step {announced.step}")
            ready = self._read(announced)
            self.watchdog.idle()  # ranks that do not take their share are named by the channel
            yield ready

    def _read(self, announced: BatchReady) -> ReadyBatch:
        data = Path(announced.path).read_bytes()
        problem = ""
        if announced.step != self.next_step:
            problem = f"batch of step {announced.step} announced, step {self.next_step} is next"
        elif digest_batch(data) != announced.digest:
            problem = f"{announced.path} is not the batch that was announced"
        if problem:
            raise WireError(problem, "resume the run: `sightline rl --resume RUN`")
        self.next_step += 1
        return self.preparer.prepare(Batch.from_bytes(data), announced.digest)
