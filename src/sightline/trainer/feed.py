"""Makes batches ready ahead of the loop: read, materialize, verify, pack.

    orchestrator --announce--> feed (own thread) --Ready batch--> loop
      waits for: an announcement, then pixels        waits for: a ready batch
      unblocked by: the orchestrator, the pool       unblocked by: feed

Media are read and verified before packing, so that a bad image costs exactly the samples that
show it and the packs are those of the batch without them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sightline.errors import MediaError, Misaligned, PixelMismatch
from sightline.families import Family
from sightline.pack import Average, Cost, pack
from sightline.pixels import Materializer, Pixels
from sightline.wire.control import Announce
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.sample import Batch, Sample, digest_of

Stack = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Lays the patches of a micro-batch's images one after the other, where the device takes them."""


@dataclass(frozen=True, slots=True)
class ReadyMicroBatch:
    batch: MicroBatch
    patches: np.ndarray | None
    """uint8, of the distinct images in their order; None when there is none."""
    shows: bool = False
    """Whether another rank shows an image beside it: then this one goes through the tower too."""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    step: int
    digest: str
    micro_batches: list[ReadyMicroBatch]
    num_samples: int
    num_slots: int
    num_images: int
    bad: dict[str, int]
    """Samples that bad media cost, by reason."""
    materialize_s: float
    waited_s: float = 0.0
    """How long the loop stood still for it."""
    num_made: int = 0
    """Of the distinct images, those that were materialized; the others came from the cache."""


@dataclass
class Preparer:
    """Turns one batch into a ready one."""

    family: Family
    materializer: Materializer
    limit: Cost
    max_bad_fraction: float
    average: Average = field(default_factory=Average)
    stack: Stack = np.concatenate

    def prepare(self, batch: Batch, digest: str) -> ReadyBatch:
        began = time.monotonic()
        made_before = self.materializer.counts.made
        pixels, problems = self._materialize(batch)
        kept, bad = self._keep(batch, pixels, problems)
        spent = time.monotonic() - began
        packs = pack(kept, batch.step, self.family, self.limit, self.average)
        ready = [ReadyMicroBatch(p, self._patches(p, pixels)) for p in packs]
        return ReadyBatch(
            step=batch.step,
            digest=digest,
            micro_batches=ready,
            num_samples=len(kept),
            num_slots=sum(len(sample.slots) for sample in kept),
            num_images=len(pixels),
            bad=dict(bad),
            materialize_s=spent,
            num_made=self.materializer.counts.made - made_before,
        )

    def _materialize(self, batch: Batch) -> tuple[dict[str, Pixels], dict[str, MediaError]]:
        items = {item.key: item for sample in batch.samples for item in sample.items}
        flights = {key: self.materializer.submit(item) for key, item in items.items()}
        pixels: dict[str, Pixels] = {}
        problems: dict[str, MediaError] = {}
        for key, flight in flights.items():
            try:
                pixels[key] = flight.result()
            except MediaError as error:
                if isinstance(error.__cause__, OSError):
                    # A disk that fails may heal; a replay would then train on other samples.
                    raise
                problems[key] = error
        return pixels, problems

    def _keep(
        self, batch: Batch, pixels: dict[str, Pixels], problems: dict[str, MediaError]
    ) -> tuple[list[Sample], Counter[str]]:
        kept: list[Sample] = []
        bad: Counter[str] = Counter()
        last: Exception | None = None
        for sample in batch.samples:
            problem = _problem_of(sample, pixels, problems)
            if problem is None:
                kept.append(sample)
            else:
                bad[type(problem).__name__] += 1
                last = problem
        if last is not None and bad.total() > self.max_bad_fraction * len(batch.samples):
            raise MediaError(
                f"step {batch.step}: bad media cost {bad.total()} of {len(batch.samples)} samples "
                f"({dict(bad)}), more than [media] max_bad_fraction = {self.max_bad_fraction} "
                f"allows. The last: {last}",
                "mend the store (`sightline media verify`), or raise the budget",
            )
        return kept, bad

    def _patches(self, packed: MicroBatch, pixels: dict[str, Pixels]) -> np.ndarray | None:
        if not packed.items:
            return None
        return self.stack([pixels[entry.item.key].patches for entry in packed.items])


def _problem_of(
    sample: Sample, pixels: dict[str, Pixels], problems: dict[str, MediaError]
) -> MediaError | PixelMismatch | None:
    for item in sample.items:
        if item.key in problems:
            return problems[item.key]
    for slot in sample.slots:
        made = pixels[sample.items[slot.item].key]
        if slot.pixel_digest is not None and slot.pixel_digest != made.digest:
            return PixelMismatch(
                f"trace {sample.trace_id}: the sampler saw pixels {slot.pixel_digest} of image "
                f"{sample.items[slot.item].ref.digest[:12]}, the trainer made {made.digest}",
                "run the same Pillow and the same processor settings on both sides",
            )
    return None


class Feed:
    """Iterates over ready batches, in step order, prepared one ahead by a thread."""

    def __init__(
        self,
        announcements: Callable[[], Announce | None],
        preparer: Preparer,
        next_step: int,
        spread: Callable[[ReadyBatch], ReadyBatch] = lambda ready: ready,
    ) -> None:
        self._announcements = announcements
        self._spread = spread
        self._preparer = preparer
        self._next_step = next_step
        self._ready: queue.Queue[ReadyBatch | BaseException | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, daemon=True, name="feed")
        self._thread.start()

    def __iter__(self) -> Iterator[ReadyBatch]:
        while True:
            began = time.monotonic()
            ready = self._ready.get()
            if isinstance(ready, BaseException):
                raise ready
            if ready is None:
                return
            yield _waited(ready, time.monotonic() - began)

    def _run(self) -> None:
        try:
            while (announced := self._announcements()) is not None:
                self._ready.put(self._read(announced))
            self._ready.put(None)
        except BaseException as error:  # the loop raises it again, in the main thread
            self._ready.put(error)

    def _read(self, announced: Announce) -> ReadyBatch:
        if announced.step != self._next_step:
            raise Misaligned(
                f"batch of step {announced.step} announced, step {self._next_step} is next",
                "resume the run: `sightline rl --resume RUN`",
            )
        data = Path(announced.path).read_bytes()
        if digest_of(data) != announced.digest:
            raise Misaligned(
                f"{announced.path} is not the batch that was announced",
                "resume the run: `sightline rl --resume RUN`",
            )
        self._next_step += 1
        return self._spread(self._preparer.prepare(Batch.from_bytes(data), announced.digest))


def _waited(ready: ReadyBatch, seconds: float) -> ReadyBatch:
    return replace(ready, waited_s=seconds)
