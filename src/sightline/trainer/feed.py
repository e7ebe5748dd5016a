"""Prepares batches ahead of the loop: read, compute advantages, verify, pack.

    orchestrator --announcement--> prefetcher (own thread) --ready batch--> loop
      waits for: an announcement, then digests       waits for: a ready batch
      unblocked by: the orchestrator, the pool       unblocked by: the prefetcher

Every item is materialized and its digest compared before packing, so a bad item costs exactly the
samples that show it. Pixels stay in the cache if there is room. The rank that trains on them
materializes the others again (`micro_batch_pixels`).
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int, UInt8
from msgspec.structs import replace as replace_fields

from sightline.algo.algorithm import Algorithm, RolloutBatch, compute_advantages
from sightline.algo.credit import AggregationFunction, by_tokens
from sightline.errors import ConfigError, MediaError, Misaligned, WireError
from sightline.pack import MicroBatchPart, PackSize, pack, split_micro_batch, truncate
from sightline.trainer.bad_media import (
    BadMediaError,
    BadMediaPolicy,
    DroppedSample,
    MediaProblems,
    PixelDigests,
    add_location,
    count_reasons,
)
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire import MediaItem
from sightline.wire.array import Array
from sightline.wire.control import BatchReady
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.sample import Batch, Sample, digest_batch


@dataclass(frozen=True, slots=True)
class ReadyMicroBatch:
    batch: MicroBatch
    made: UInt8[np.ndarray, "patches values"] | None = None
    """Patches of the distinct items, in order; None if there are no items, or not made yet."""
    runs_tower: bool = False
    """Whether this rank runs the vision tower, because any rank has an image in this round."""
    has_stored_pixels: bool = True
    """Whether the patches belong to the items. A probe swaps them."""
    pixels: MicroBatchPixels | None = None
    """Makes the patches that do not exist yet."""

    @property
    def patch_starts(self) -> Int[np.ndarray, " starts"]:
        """Return the index in `made` at which each item starts, and the number of patches."""
        return np.cumsum([0, *(entry.item.num_patches for entry in self.batch.items)])

    def split(self) -> list[tuple[ReadyMicroBatch, np.ndarray]]:
        """Return two parts with masks of their trained tokens, or nothing for a single rollout."""
        return [(self.take(part), part.trains) for part in split_micro_batch(self.batch)]

    def take(self, part: MicroBatchPart) -> ReadyMicroBatch:
        return replace(self, batch=part.batch, made=self.take_patches(part.items))

    def take_patches(self, items: Sequence[int]) -> UInt8[np.ndarray, "patches values"] | None:
        """Return the patches of these items; None if there are none, or not made yet."""
        if self.made is None or not len(items):
            return None
        starts = self.patch_starts
        return np.concatenate([self.made[starts[at] : starts[at + 1]] for at in items])


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    step: int
    digest: str
    micro_batches: list[ReadyMicroBatch]
    materialize_s: float
    """Seconds for reading, materializing and digesting the items, before packing."""
    num_samples: int = 0
    """Samples of the batch. Only rank 0 has these and the counts below."""
    num_slots: int = 0
    """Items that the samples show, with repetitions."""
    num_items: int = 0
    """Distinct items of the samples."""
    dropped: list[DroppedSample] = field(default_factory=list)
    """Samples that were dropped for bad media."""
    truncated: dict[str, int] = field(default_factory=dict)
    """Samples longer than `[trainer] max_sequence_tokens`: cut, or left out and why."""
    held_out: bool = False
    """Whether the batch is evaluated instead of trained."""
    is_last: bool = False
    """Whether the evaluation ends with this batch."""
    waited_s: float = 0.0
    """Seconds that the loop waited for the batch."""
    minibatch_sizes: list[int] | None = None
    """The number of micro-batches in each minibatch; None for a single minibatch."""
    rollouts: RolloutBatch | None = None
    """The whole batch, on rank 0, if its advantages depend on values or a teacher. The learner
    computes them before the first update."""

    @property
    def minibatches(self) -> list[range]:
        """Return the places of each minibatch's micro-batches."""
        ends = [0, *itertools.accumulate(self.minibatch_sizes or [len(self.micro_batches)])]
        return [range(start, stop) for start, stop in itertools.pairwise(ends)]

    def start_pixels(self) -> None:
        """Start making the first micro-batch's pixels, if they are small.

        The previous batch is still in training.
        """
        if self.micro_batches and (pixels := self.micro_batches[0].pixels) is not None:
            pixels.start(self.micro_batches[0].batch, max_fraction=1 / 3)

    def with_pixels(self) -> ReadyBatch:
        """Return the batch with all its pixels, without a memory limit."""

        def stack(ready: ReadyMicroBatch) -> ReadyMicroBatch:
            if ready.made is not None or ready.pixels is None or not ready.batch.items:
                return ready
            return replace(ready, made=ready.pixels.stack(ready.batch))

        return replace(self, micro_batches=list(map(stack, self.micro_batches)))

    def iterate_with_pixels(
        self, places: range | None = None
    ) -> Iterator[tuple[int, ReadyMicroBatch]]:
        """Yield the micro-batches at `places`, by default all, with their pixels and places.

        A thread makes the next one's pixels meanwhile. Each item must be released before the next
        one is requested, so do not use `enumerate`, which keeps a reference.
        """
        places = range(len(self.micro_batches)) if places is None else places
        for place in places:
            ready = self.micro_batches[place]
            if ready.pixels is None or ready.made is not None:
                yield place, ready
                continue
            patches = ready.pixels.take(ready.batch)
            try:
                if place + 1 in places and self.micro_batches[place + 1].made is None:
                    ready.pixels.start(self.micro_batches[place + 1].batch)
                yield place, replace(ready, made=patches)
            finally:  # even if an out-of-memory error ends the iteration
                del patches
                ready.pixels.release(ready.batch)

    @property
    def bad(self) -> dict[str, int]:
        """Return the number of samples dropped for bad media, by reason."""
        return count_reasons(self.dropped)


@dataclass
class BatchPreparer:
    pixels: MicroBatchPixels
    """Makes the pixels of this rank's micro-batches."""
    limit: PackSize
    bad_media: BadMediaPolicy = BadMediaPolicy()
    aggregation: AggregationFunction = by_tokens
    max_sequence_tokens: int = 0
    """Maximum tokens of a sample; 0 for no limit."""
    algorithm: Algorithm | None = None
    """Computes the advantages of batches that have none stored."""
    num_minibatches: int = 1
    seed: int = 0
    """Seed, together with the step, of the assignment of groups to minibatches."""

    def prepare(self, batch: Batch, digest: str, lost: Sequence[DroppedSample] = ()) -> ReadyBatch:
        """Prepare a batch for training. `lost` are samples already dropped for bad media."""
        # Before samples are cut or dropped, so that a lost image changes no sibling's baseline.
        batch, rollouts = self._add_advantages(batch)
        truncated: dict[str, int] = {}
        if self.max_sequence_tokens:
            fitting, counts = truncate(batch.samples, self.max_sequence_tokens)
            if batch.samples and not fitting:
                problem = "[trainer] max_sequence_tokens cuts every sample to its prompt"
                fix = "start a new run with a higher value, or 0 for no limit"
                raise ConfigError(f"step {batch.step}: {problem}", fix)
            batch, truncated = Batch(batch.step, fitting), dict(counts)
        began = time.monotonic()
        digests, problems = self._digest_items(batch)
        materializer = self.pixels.materializer
        store, family = materializer.store, materializer.family
        usable, dropped = self.bad_media.filter_samples(batch, digests, problems, store, lost)
        spent = time.monotonic() - began
        minibatches = [
            pack(samples, batch.step, family, self.limit, self.aggregation)
            for samples in self._split(usable, batch.step)
        ]
        return ReadyBatch(
            step=batch.step,
            digest=digest,
            micro_batches=[
                ReadyMicroBatch(_add_digests(micro_batch, digests), pixels=self.pixels)
                for micro_batches in minibatches
                for micro_batch in micro_batches
            ],
            minibatch_sizes=list(map(len, minibatches)),
            rollouts=rollouts,
            materialize_s=spent,
            num_samples=len(usable),
            num_slots=sum(len(sample.slots) for sample in usable),
            num_items=len({item.key for sample in usable for item in sample.items}),
            dropped=dropped,
            truncated=truncated,
        )

    def _add_advantages(self, batch: Batch) -> tuple[Batch, RolloutBatch | None]:
        """Return the batch with advantages, and its rollouts if they have to wait for scores."""
        samples = batch.samples
        if self.algorithm is None or all(sample.advantages is not None for sample in samples):
            return batch, None
        rollouts, needs = RolloutBatch.of(samples), self.algorithm.needs
        waits = needs.values or needs.teacher_logprobs
        if waits:
            advantages = [np.zeros(len(sample.trained)) for sample in samples]
        else:
            advantages = compute_advantages(self.algorithm, rollouts)
        samples = [
            replace_fields(sample, advantages=Array.of(row, "float32"))
            for sample, row in zip(samples, advantages, strict=True)
        ]
        return Batch(batch.step, samples), rollouts if waits else None

    def _split(self, samples: Sequence[Sample], step: int) -> list[list[Sample]]:
        """Return the samples of each minibatch. Groups stay whole and are assigned at random."""
        if self.num_minibatches == 1:
            return [list(samples)]
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id or sample.trace_id, []).append(sample)
        order = np.random.default_rng([self.seed % (1 << 32), step]).permutation(len(groups))
        members = list(groups.values())
        parts = [places for places in np.array_split(order, self.num_minibatches) if len(places)]
        return [[s for place in sorted(places) for s in members[place]] for places in parts]

    def _digest_items(self, batch: Batch) -> tuple[PixelDigests, MediaProblems]:
        """Return the digests of all items, and the problems of bad ones."""
        # Keyed by the whole item, so that an item with a wrong size fails alone.
        samples_by_item = {item: sample for sample in batch.samples for item in sample.items}
        digests: dict[MediaItem, str] = {}
        problems: dict[MediaItem, BadMediaError] = {}
        materializer = self.pixels.materializer
        materializer.store.prefetch(ref for item in samples_by_item for ref in item.refs)
        for item, flight in materializer.iterate(samples_by_item, self.pixels.item_bytes):
            try:
                digests[item] = flight.result().digest
            except Misaligned as error:
                problems[item] = error
            except MediaError as error:
                if isinstance(error.__cause__, OSError):
                    # A disk error may be temporary, and a replay would then train on other samples.
                    name, store = samples_by_item[item].trace_id, materializer.store
                    raise add_location(error, name, batch.step, item, store) from error
                problems[item] = error
            del flight  # frees its pixels before the next item is made
        return digests, problems


def _add_digests(packed: MicroBatch, digests: PixelDigests) -> MicroBatch:
    """Add the pixel digests that every rank must reproduce."""
    items = [replace_fields(e, pixel_digest=digests[e.item]) for e in packed.items]
    return replace_fields(packed, items=items)


class BatchPrefetcher:
    """Iterates over batches that a thread prepares, one ahead of the loop.

    The thread starts with the iteration, and waits until the loop takes the batch.
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
        """Raise `error` in the loop when it asks for its next batch. Return at once."""
        self._error = error
        with contextlib.suppress(queue.Full):  # if it is full, the loop wakes up anyway
            self._ready.put_nowait(error)

    def _run(self) -> None:
        try:
            for ready in self._batches:
                ready.start_pixels()
                self._ready.put(ready)
            self._ready.put(None)
        except BaseException as error:  # the loop raises it again, in the main thread
            self._ready.put(error)


def read_announced(
    announcements: Callable[[], BatchReady | None],
    preparer: BatchPreparer,
    next_step: int,
    watchdog: StallWatchdog,
) -> Iterator[ReadyBatch]:
    """Yield the batches that the orchestrator announces, prepared, in step order.

    `watchdog` monitors the thread that iterates: the loop's watchdog is idle while it waits.
    """
    while (announced := announcements()) is not None:
        watchdog.enter(f"preparing step {announced.step}")
        problem = ""
        if announced.step != next_step:
            problem = f"batch of step {announced.step} announced, step {next_step} is next"
        elif digest_batch(announced.data) != announced.digest:
            problem = f"the batch of step {announced.step} differs from its announced digest"
        if problem:
            raise WireError(problem, "resume the run: `sightline rl --resume RUN`")
        next_step += 1
        ready = preparer.prepare(Batch.from_bytes(announced.data), announced.digest)
        watchdog.idle()  # the channel names ranks that do not take their share
        yield ready
