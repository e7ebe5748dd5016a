"""Makes batches ready ahead of the loop: read, materialize, verify, pack.

    orchestrator --announce--> feed (own thread) --Ready batch--> loop
      waits for: an announcement, then pixels        waits for: a ready batch
      unblocked by: the orchestrator, the pool       unblocked by: feed

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
from typing import Literal

import msgspec
import numpy as np

from sightline.algo.aggregation import AggregationFunction, by_tokens
from sightline.errors import MediaError, Misaligned
from sightline.families import Family
from sightline.pack import PackSize, pack, truncate
from sightline.pixels import Materializer, Pixels
from sightline.trainer.bad_media import (
    BadMediaError,
    BadMediaPolicy,
    DroppedSample,
    add_location,
    count_reasons,
    is_unproven,
)
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire import MediaItem
from sightline.wire.control import BatchReady
from sightline.wire.micro_batch import MicroBatch, PackedItem
from sightline.wire.sample import Batch, digest_batch

StackPatches = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Lays the patches of a micro-batch's images one after the other, where the device takes them."""


@dataclass(frozen=True, slots=True)
class ReadyMicroBatch:
    batch: MicroBatch
    patches: np.ndarray | None
    """uint8, of the distinct images in their order; None when there is none."""
    shows: bool = False
    """Whether another rank shows an image beside it: then this one goes through the tower too."""
    has_stored_pixels: bool = True
    """Whether the patches are those of the items; a probe exchanges them."""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    step: int
    digest: str
    micro_batches: list[ReadyMicroBatch]
    num_samples: int
    num_slots: int
    num_images: int
    materialize_s: float
    dropped: list[DroppedSample] = field(default_factory=list)
    """Samples that bad media cost."""
    truncated: dict[str, int] = field(default_factory=dict)
    """Samples beyond `[trainer] max_sequence_tokens`: cut, or left out and why."""
    held_out: bool = False
    """To be evaluated; nothing is learnt from it."""
    is_last: bool = False
    """Whether the evaluation ends with it."""
    waited_s: float = 0.0
    """How long the loop stood still for it."""
    num_unproven: int = 0
    """Samples that train although their sampler gave no digest of its pixels."""
    num_made: int = 0
    """Of the distinct images, those that were materialized; the others came from the cache."""

    @property
    def bad(self) -> dict[str, int]:
        """Samples that bad media cost, by reason."""
        return count_reasons(self.dropped)


@dataclass
class BatchPreparer:
    """Turns one batch into a ready one."""

    family: Family
    materializer: Materializer
    limit: PackSize
    max_bad_fraction: float
    aggregation: AggregationFunction = by_tokens
    on_bad_image: Literal["drop_sample", "stop"] = "drop_sample"
    max_sequence_tokens: int = 0
    """In tokens; 0 is any length."""
    allows_unverified_pixels: bool = False
    """Whether samples train whose sampler gave no digest of its pixels."""
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
        policy = BadMediaPolicy(
            self.on_bad_image, self.max_bad_fraction, self.allows_unverified_pixels
        )
        kept, dropped = policy.filter_samples(batch, made, problems, self.materializer.store, lost)
        spent = time.monotonic() - began
        packs = pack(kept, batch.step, self.family, self.limit, self.aggregation)
        return ReadyBatch(
            step=batch.step,
            digest=digest,
            micro_batches=[_attach_pixels(packed, made, self.stack) for packed in packs],
            num_samples=len(kept),
            num_slots=sum(len(sample.slots) for sample in kept),
            num_images=len({item.key for sample in kept for item in sample.items}),
            materialize_s=spent,
            dropped=dropped,
            truncated=truncated,
            num_unproven=sum(is_unproven(sample) for sample in kept),
            num_made=self.materializer.counts.made - made_before,
        )

    def _materialize(
        self, batch: Batch
    ) -> tuple[dict[MediaItem, Pixels], dict[MediaItem, BadMediaError]]:
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


def _attach_pixels(
    packed: MicroBatch, made: dict[MediaItem, Pixels], stack: StackPatches
) -> ReadyMicroBatch:
    """With its pixels, and the digests that every other process has to come to."""
    if not packed.items:
        return ReadyMicroBatch(packed, None)
    pixels = [made[entry.item] for entry in packed.items]
    items = [
        PackedItem(entry.item, one.digest, entry.wanted_by)
        for entry, one in zip(packed.items, pixels, strict=True)
    ]
    patches = stack([one.patches for one in pixels])
    return ReadyMicroBatch(msgspec.structs.replace(packed, items=items), patches)


class BatchPrefetcher:
    """Iterates over batches that a thread makes ready, one ahead; it begins with the first."""

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


class BatchFeed:
    """Iterates over ready batches, in step order, prepared one ahead by a thread."""

    def __init__(
        self,
        announcements: Callable[[], BatchReady | None],
        preparer: BatchPreparer,
        next_step: int,
        distribute: Callable[[ReadyBatch], ReadyBatch] = lambda ready: ready,
        watchdog: StallWatchdog | None = None,
    ) -> None:
        """`watchdog` watches the thread: the loop's own rests while it waits for a batch."""
        self._announcements = announcements
        self._watchdog = watchdog or StallWatchdog()
        self._distribute = distribute
        self._preparer = preparer
        self._next_step = next_step
        self._ahead = BatchPrefetcher(self._batches())
        self.fail = self._ahead.fail

    def __iter__(self) -> Iterator[ReadyBatch]:
        return iter(self._ahead)

    def _batches(self) -> Iterator[ReadyBatch]:
        while (announced := self._announcements()) is not None:
            self._watchdog.mark(f"preparing step {announced.step}")
            ready = self._read(announced)
            self._watchdog.rest()  # ranks that do not take their share are named by who hands it out
            yield self._distribute(ready)

    def _read(self, announced: BatchReady) -> ReadyBatch:
        if announced.step != self._next_step:
            raise Misaligned(
                f"batch of step {announced.step} announced, step {self._next_step} is next",
                "resume the run: `sightline rl --resume RUN`",
            )
        data = Path(announced.path).read_bytes()
        if digest_batch(data) != announced.digest:
            raise Misaligned(
                f"{announced.path} is not the batch that was announced",
                "resume the run: `sightline rl --resume RUN`",
            )
        self._next_step += 1
        return self._preparer.prepare(Batch.from_bytes(data), announced.digest)
