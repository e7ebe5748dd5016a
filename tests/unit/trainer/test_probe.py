"""The probe distinguishes a model that uses its images, and does not affect training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import making
import numpy as np
import pytest
import torch

from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.probe import find_tokens_behind, probe, swap_images
from sightline.wire.sample import Batch

WHOLE = PackSize(1 << 20, 1 << 20)


@pytest.fixture
def learner(tiny_model: Path, store: MediaStore) -> Learner:
    config = making.trainer_config()
    return making.build_learner(making.model_config(tiny_model), config, store, steps=10)


@pytest.fixture
def batch(learner: Learner, tiny_model: Path, store: MediaStore) -> ReadyBatch:
    samples = making.samples(tiny_model, store, count=6, seed=1)
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), WHOLE)
    return preparer.prepare(Batch(5, samples), digest="").with_pixels()


def test_probe_distinguishes_seeing_from_blind_models(learner: Learner, batch: ReadyBatch) -> None:
    (ready,) = batch.micro_batches
    seen = probe(ready, learner.score)
    assert seen is not None and not seen.is_blind
    assert not seen.is_weak and "barely" not in seen.words
    weak = replace(seen, change=1e-4)
    assert weak.is_weak and "barely uses its images" in weak.words
    assert seen.change > 1000 * seen.noise and seen.exchanged_kl > 0
    # Pixels that are lost on the way: every image is the same grey.
    lost = replace(ready, made=np.full_like(ready.made, 127))
    blind = probe(lost, learner.score)
    assert blind is not None and blind.is_blind
    assert blind.words.startswith("Blind: swapping the images")


def test_disconnected_tower_is_blind(learner: Learner, batch: ReadyBatch) -> None:
    encode = learner.forward.encode

    class Unplugged:
        def __getattr__(self, name: str) -> object:
            return getattr(learner_forward, name)

        def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
            return torch.zeros_like(encode(patches, grids))

    learner_forward = learner.forward
    learner.forward = Unplugged()  # type: ignore[assignment]
    probed = probe(batch.micro_batches[0], learner.score)
    assert probed is not None and probed.is_blind


def test_probe_swaps_only_whole_images_of_equal_grid(batch: ReadyBatch) -> None:
    (ready,) = batch.micro_batches
    swapped = swap_images(ready)
    assert swapped is not None
    other, moved = swapped
    assert other.batch is ready.batch and moved.any()
    assert other.made is not None and ready.made is not None
    assert other.made.shape == ready.made.shape

    def pictures(patches: np.ndarray) -> list[bytes]:
        sizes = [int(np.prod(entry.item.grid)) for entry in ready.batch.items]
        return [part.tobytes() for part in np.split(patches, np.cumsum(sizes)[:-1])]

    before, after = pictures(ready.made), pictures(other.made)
    assert sorted(before) == sorted(after)
    for entry, was, now, has_moved in zip(ready.batch.items, before, after, moved, strict=True):
        assert has_moved == (was != now)
        donor = ready.batch.items[before.index(now)]
        assert donor.item.grid == entry.item.grid


def test_probe_counts_only_tokens_after_a_swapped_image(
    learner: Learner, batch: ReadyBatch
) -> None:
    (ready,) = batch.micro_batches
    swapped = swap_images(ready)
    assert swapped is not None
    other, moved = swapped
    changed = learner.score(other) != learner.score(ready)
    chosen = find_tokens_behind(ready, moved)
    assert not (changed & ~chosen).any()
    assert changed[chosen].mean() > 0.9
