"""Drops the samples of a batch whose images cannot be used.

A missing, corrupt or mismatching image costs only the samples that show it. They are dropped
before packing, so the packs are the same as without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sightline.errors import MediaError, Misaligned, PixelMismatch, PixelsUnproven, SightlineError
from sightline.media import MediaStore
from sightline.wire import MediaItem
from sightline.wire.sample import Batch, Sample

BadMediaError = MediaError | Misaligned | PixelMismatch | PixelsUnproven
PixelDigests = Mapping[MediaItem, str]
MediaProblems = Mapping[MediaItem, BadMediaError]
BadT = TypeVar("BadT", bound=SightlineError)


@dataclass(frozen=True, slots=True)
class DroppedSample:
    """A sample that was dropped because of an image."""

    sample: str
    image: str
    """The digest. Empty if the bytes never arrived."""
    reason: str
    problem: str
    fix: str = "repair the store (`sightline media verify`)"


@dataclass(frozen=True, slots=True)
class BadMediaPolicy:
    """Which samples of a batch are dropped, and how many may be."""

    max_bad_fraction: float = 0.0
    """`[media] max_bad_fraction`; 0 stops the run at the first bad image."""
    allows_unverified_pixels: bool = False
    """Whether samples may lack a pixel digest: conversations have no sampler to report one."""

    def filter_samples(
        self,
        batch: Batch,
        digests: PixelDigests,
        problems: MediaProblems,
        store: MediaStore,
        lost: Sequence[DroppedSample] = (),
    ) -> tuple[list[Sample], list[DroppedSample]]:
        """Return the good samples and the dropped ones. Raise if too many are dropped.

        `lost` are samples that were already dropped, because an image never arrived.
        """
        usable: list[Sample] = []
        dropped = list(lost)
        for sample in batch.samples:
            if (problem := self._find_problem(sample, digests, problems)) is None:
                usable.append(sample)
                continue
            item, bare = problem
            error = add_location(bare, sample.trace_id, batch.step, item, store)
            identity = (sample.trace_id, item.ref.digest, type(bare).__name__)
            dropped.append(DroppedSample(*identity, error.problem, error.fix))
        num = len(usable) + len(dropped)
        if len(dropped) > self.max_bad_fraction * num:
            raise MediaError(
                f"step {batch.step}: bad media cost {len(dropped)} of {num} samples "
                f"({count_reasons(dropped)}), more than [media] max_bad_fraction = "
                f"{self.max_bad_fraction} allows. The last: {dropped[-1].problem}",
                f"{dropped[-1].fix}; or raise the budget",
            )
        return usable, dropped

    def _find_problem(
        self, sample: Sample, digests: PixelDigests, problems: MediaProblems
    ) -> tuple[MediaItem, BadMediaError] | None:
        for item in sample.items:
            if item in problems:
                return item, problems[item]
        items = [(sample.items[slot.item], slot.pixel_digest) for slot in sample.slots]
        for item, seen in items:
            if seen is not None and seen != digests[item]:
                return item, build_pixel_mismatch(seen, digests[item])
        for item, seen in items:
            if seen is None and not self.allows_unverified_pixels:
                return item, PixelsUnproven(
                    "the sampler reported no digest of its pixels", "use an engine that reports one"
                )
        return None


def count_reasons(dropped: Sequence[DroppedSample]) -> dict[str, int]:
    return dict(Counter(sample.reason for sample in dropped))


def add_location(error: BadT, sample: str, step: int, item: MediaItem, store: MediaStore) -> BadT:
    """Return the error with the sample, step, item and store of the image."""
    where = f"sample {sample} of step {step}, {item.name}"
    return type(error)(f"{where}: {error.problem} (searched: {store.places})", error.fix)


def build_pixel_mismatch(seen: str, made: str) -> PixelMismatch:
    return PixelMismatch(
        f"the sampler saw pixels {seen}, the trainer made {made}",
        "use the same version of Pillow and the same processor settings on both sides",
    )
