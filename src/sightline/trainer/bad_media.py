"""What becomes of a batch when some of its images cannot be used.

A missing, corrupt or mismatching image costs the samples that show it, and no other: they leave
before packing, so that the packs are those of the batch without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from sightline.errors import (
    MediaError,
    Misaligned,
    PixelMismatch,
    PixelsUnproven,
    SightlineError,
)
from sightline.media import MediaStore
from sightline.pixels import Pixels
from sightline.wire import MediaItem
from sightline.wire.sample import Batch, Sample

BadMedia = MediaError | Misaligned | PixelMismatch | PixelsUnproven
BadT = TypeVar("BadT", bound=SightlineError)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that an image cost."""

    sample: str
    image: str
    """The digest; empty where its bytes never came."""
    reason: str
    problem: str
    fix: str = "mend the store (`sightline media verify`)"


@dataclass(frozen=True, slots=True)
class Policy:
    """`[media] on_bad`, with its budget."""

    on_bad: Literal["drop_sample", "stop"] = "drop_sample"
    max_bad_fraction: float = 0.0
    allows_unproven: bool = False
    """Whether samples train whose sampler gave no digest of its pixels."""

    def keep(
        self,
        batch: Batch,
        made: Mapping[MediaItem, Pixels],
        problems: Mapping[MediaItem, BadMedia],
        store: MediaStore,
        lost: Sequence[Dropped] = (),
    ) -> tuple[list[Sample], list[Dropped]]:
        """The samples whose images are all well, and the others; raises past the budget.

        `lost` are samples of the batch that had no image to begin with.
        """
        kept: list[Sample] = []
        dropped = list(lost)
        for sample in batch.samples:
            found = _find_problem(sample, made, problems) or self._find_unproven(sample)
            if found is None:
                kept.append(sample)
                continue
            item, bare = found
            error = named(bare, sample.trace_id, batch.step, item, store)
            if self.on_bad == "stop":
                raise error from bare
            reason = type(bare).__name__
            dropped.append(
                Dropped(sample.trace_id, item.ref.digest, reason, error.problem, error.fix)
            )
        self._check_budget(batch.step, len(kept) + len(dropped), dropped)
        return kept, dropped

    def _find_unproven(self, sample: Sample) -> tuple[MediaItem, BadMedia] | None:
        if self.allows_unproven or not is_unproven(sample):
            return None
        slot = next(slot for slot in sample.slots if slot.pixel_digest is None)
        return sample.items[slot.item], PixelsUnproven(
            "the sampler gave no digest of the pixels that it saw",
            "sample with an engine that gives one, or set [media] allow_unproven = true",
        )

    def _check_budget(self, step: int, num: int, dropped: Sequence[Dropped]) -> None:
        if len(dropped) > self.max_bad_fraction * num:
            raise MediaError(
                f"step {step}: bad media cost {len(dropped)} of {num} samples "
                f"({count_reasons(dropped)}), more than [media] max_bad_fraction = "
                f"{self.max_bad_fraction} allows. The last: {dropped[-1].problem}",
                f"{dropped[-1].fix}; or raise the budget",
            )


def is_unproven(sample: Sample) -> bool:
    """Whether nothing says which pixels were seen in one of its slots."""
    return any(slot.pixel_digest is None for slot in sample.slots)


def count_reasons(dropped: Sequence[Dropped]) -> dict[str, int]:
    return dict(Counter(one.reason for one in dropped))


def named(error: BadT, sample: str, step: int, item: MediaItem, store: MediaStore) -> BadT:
    """The error with what a reader needs to find the image: who wanted it, when, and where."""
    roots = " and ".join(str(root) for root in (store.root, *store.fallback_roots))
    where = f"sample {sample} of step {step}, image {item.ref.digest[:12]}"
    return type(error)(f"{where}: {error.problem} (searched: {roots})", error.fix)


def mismatch(seen: str, made: str) -> PixelMismatch:
    return PixelMismatch(
        f"the sampler saw pixels {seen}, the trainer made {made}",
        "run the same Pillow and the same processor settings on both sides",
    )


def _find_problem(
    sample: Sample, made: Mapping[MediaItem, Pixels], problems: Mapping[MediaItem, BadMedia]
) -> tuple[MediaItem, BadMedia] | None:
    for item in sample.items:
        if item in problems:
            return item, problems[item]
    for slot in sample.slots:
        item = sample.items[slot.item]
        if slot.pixel_digest is not None and slot.pixel_digest != made[item].digest:
            return item, mismatch(slot.pixel_digest, made[item].digest)
    return None
