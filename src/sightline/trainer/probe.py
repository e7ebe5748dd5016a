"""Measures whether the model uses its images, by scoring tokens again with images swapped.

A model can train blind while loss and reward look normal, because pixels are lost or the tower is
not connected. Swapping its images then changes nothing. Only images of the same grid are
swapped, so tokens and positions stay the same. One rank probes one micro-batch. The others run the
same number of passes, because all ranks gather the blocks of a sharded model together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from sightline.trainer.feed import ReadyMicroBatch

IsMoved = Bool[np.ndarray, " images"]
Score = Callable[[ReadyMicroBatch], Float[np.ndarray, " tokens"]]
"""The logprobs of the trained tokens."""
NOISE = 10.0
"""Factor by which an effect must exceed the difference between two identical passes."""
FLOOR = 1e-9
"""Mean change of logprobs below which there is no effect."""
NUM_PASSES = 3
"""Passes of a probe: the original images twice, then swapped images."""
WEAK_CHANGE = 1e-3
"""A smaller change is weak: probabilities change by less than a thousandth."""


@dataclass(frozen=True, slots=True)
class ImageSwapProbe:
    tokens: int
    """The number of trained tokens after a swapped image."""
    exchanged_kl: float
    """Their mean r - 1 - log r, with swapped images compared with the original ones."""
    same_kl: float
    """Their mean r - 1 - log r, scored twice with the original images."""
    change: float
    """Mean |difference of logprobs| with swapped images."""
    noise: float
    """Mean |difference of logprobs| with the original images."""

    @property
    def is_blind(self) -> bool:
        return self.change <= max(NOISE * self.noise, FLOOR)

    @property
    def is_weak(self) -> bool:
        return self.change < WEAK_CHANGE

    @property
    def words(self) -> str:
        if self.is_blind:
            return (
                f"Blind: swapping the images does not change the logprobs of {self.tokens} tokens. "
                "The pixels do not reach the model, so it learns to guess."
            )
        uses = "barely uses" if self.is_weak else "uses"
        return (
            f"The model {uses} its images: swapping them changes token logprobs by "
            f"{self.change:.2g} on average ({self.tokens} tokens)."
        )


def _find_donors(ready: ReadyMicroBatch) -> tuple[Int[np.ndarray, " images"], IsMoved]:
    """Return the index of the image that replaces each image, and whether it is another one.

    Images of the same grid rotate.
    """
    grids = [entry.item.grid for entry in ready.batch.items]
    donors = np.arange(len(grids))
    for grid in set(grids):
        places = [i for i, other in enumerate(grids) if other == grid]
        donors[places] = [*places[1:], places[0]]
    return donors, donors != np.arange(len(donors))


def swap_images(ready: ReadyMicroBatch) -> tuple[ReadyMicroBatch, IsMoved]:
    """Return the micro-batch with images swapped, and which images changed."""
    donors, moved = _find_donors(ready)
    return replace(ready, made=ready.take_patches(donors.tolist()), has_stored_pixels=False), moved


def find_tokens_behind(ready: ReadyMicroBatch, moved: IsMoved) -> Bool[np.ndarray, " tokens"]:
    """Return whether each trained token may attend to a swapped image."""
    batch = ready.batch
    sees = np.zeros(len(batch.token_ids), dtype=bool)
    ends = batch.subtree_end.numpy()
    for slot in batch.slots:
        if moved[slot.item]:
            sees[slot.end : ends[slot.end - 1]] = True
    return sees[batch.trained.numpy()]


def pick_probe_micro_batch(
    candidates: Sequence[ReadyMicroBatch],
) -> tuple[str, ReadyMicroBatch] | None:
    """Return a micro-batch to probe, with its name: the same on any number of ranks.

    Some of its trained tokens may attend to an image that can be swapped.
    """
    named = [
        (f"{first.trace_id}/{first.node}", ready)
        for ready in candidates
        for first in ready.batch.origins[:1]
        if find_tokens_behind(ready, _find_donors(ready)[1]).any()
    ]
    return min(named, key=lambda candidate: candidate[0], default=None)


def probe(ready: ReadyMicroBatch, score: Score) -> ImageSwapProbe:
    """Probe a micro-batch that `pick_probe_micro_batch` has chosen."""
    other, moved = swap_images(ready)
    chosen = find_tokens_behind(ready, moved)
    reference = score(ready)[chosen].astype(np.float64)
    again = score(ready)[chosen] - reference
    changed = score(other)[chosen] - reference
    return ImageSwapProbe(
        tokens=int(chosen.sum()),
        exchanged_kl=float((np.expm1(changed) - changed).mean()),
        same_kl=float((np.expm1(again) - again).mean()),
        change=float(np.abs(changed).mean()),
        noise=float(np.abs(again).mean()),
    )
