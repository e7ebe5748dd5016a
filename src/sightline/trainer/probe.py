"""Does the model use its images? The same tokens are scored again with images exchanged.

A model that trains blind (pixels dropped on some wire, a tower that is not connected) answers a
picture that it was not shown exactly as it answers its own, while loss and reward look normal.
Only images of one grid are exchanged, so that tokens and positions stay as they are. One
micro-batch is probed, on whatever rank it is; the others run as many passes, for the blocks of a
sharded model are gathered by all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from sightline.trainer.feed import ReadyMicroBatch

IsMoved = Bool[np.ndarray, " images"]
IsChosen = Bool[np.ndarray, " tokens"]
Score = Callable[[ReadyMicroBatch], Float[np.ndarray, " tokens"]]
"""The logprobs of the trained tokens."""
NOISE = 10.0
"""An effect below so many times that of scoring twice is none."""
FLOOR = 1e-9
"""Mean change of a logprob that no arithmetic can tell from none."""
NUM_PASSES = 3
"""With its own images, with its own again, and with others."""
WEAK_CHANGE = 1e-3
"""Below this change images hardly matter: a probability moves by less than a thousandth."""


@dataclass(frozen=True, slots=True)
class ImageSwapProbe:
    tokens: int
    """Trained tokens behind an image that was exchanged."""
    exchanged_kl: float
    """Mean r - 1 - log r of them, with exchanged images against their own."""
    same_kl: float
    """Mean r - 1 - log r of scoring them twice with their own images."""
    change: float
    """Mean |difference of logprobs| when images are exchanged."""
    noise: float
    """Mean |difference of logprobs| when nothing is."""

    @property
    def is_blind(self) -> bool:
        return self.change <= max(NOISE * self.noise, FLOOR)

    @property
    def words(self) -> str:
        if self.is_blind:
            return (
                f"Blind: exchanging the images changes nothing about {self.tokens} sampled tokens. "
                "The pixels do not reach the model; training on them teaches it to guess."
            )
        looks = "hardly looks" if self.change < WEAK_CHANGE else "looks"
        return (
            f"The model {looks}: exchanging the images moves the logprobs of {self.tokens} sampled "
            f"tokens by {self.change:.2g} on average."
        )


def _find_donors(ready: ReadyMicroBatch) -> tuple[Int[np.ndarray, " images"], IsMoved]:
    """For each image the one that comes in its place, and whether that is another.

    Those of one grid change places in a circle.
    """
    grids = [entry.item.grid for entry in ready.batch.items]
    donors = np.arange(len(grids))
    for grid in set(grids):
        places = [i for i, other in enumerate(grids) if other == grid]
        donors[places] = [*places[1:], places[0]]
    return donors, donors != np.arange(len(donors))


def swap_images(ready: ReadyMicroBatch) -> tuple[ReadyMicroBatch, IsMoved] | None:
    """The micro-batch with images exchanged, and which images changed.

    None where no two distinct images have the same grid.
    """
    donors, moved = _find_donors(ready)
    if not moved.any() or (patches := ready.made) is None:
        return None
    starts = ready.patch_starts
    rows = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in donors])
    return replace(ready, made=patches[rows], has_stored_pixels=False), moved


def find_tokens_behind(ready: ReadyMicroBatch, moved: IsMoved) -> IsChosen:
    """Whether each trained token may attend to an image that was exchanged."""
    batch = ready.batch
    sees = np.zeros(len(batch.token_ids), dtype=bool)
    ends = batch.subtree_end.numpy()
    for slot in batch.slots:
        if moved[slot.item]:
            sees[slot.end : ends[slot.end - 1]] = True
    return sees[batch.trained.numpy()]


def _can_probe(ready: ReadyMicroBatch) -> bool:
    """Whether images can be exchanged that trained tokens may attend to."""
    return bool(find_tokens_behind(ready, _find_donors(ready)[1]).any())


def pick_probe_micro_batch(
    candidates: Sequence[ReadyMicroBatch],
) -> tuple[str, ReadyMicroBatch] | None:
    """A micro-batch that can be probed, with its name: the same on any number of ranks."""
    named = [
        (f"{first.trace_id}/{first.node}", ready)
        for ready in candidates
        for first in ready.batch.origins[:1]
    ]
    named.sort(key=lambda one: one[0])
    return next((one for one in named if _can_probe(one[1])), None)


def probe(ready: ReadyMicroBatch, score: Score) -> ImageSwapProbe | None:
    """None where nothing can be exchanged, or nothing trained stands behind it."""
    if not _can_probe(ready) or (swapped := swap_images(ready)) is None:
        return None
    other, moved = swapped
    chosen = find_tokens_behind(ready, moved)
    own = score(ready)[chosen].astype(np.float64)
    again = score(ready)[chosen] - own
    changed = score(other)[chosen] - own
    return ImageSwapProbe(
        tokens=int(chosen.sum()),
        exchanged_kl=float((np.expm1(changed) - changed).mean()),
        same_kl=float((np.expm1(again) - again).mean()),
        change=float(np.abs(changed).mean()),
        noise=float(np.abs(again).mean()),
    )
