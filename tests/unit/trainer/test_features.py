"""A frozen tower encodes an image once. The cache is bounded and changes no result."""

from __future__ import annotations

from pathlib import Path

import making
import numpy as np
import pytest
import torch

from sightline.compute.feature_cache import FeatureCache
from sightline.families.device_copy import copy_to_device
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer import forward_pass
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire.sample import Batch


class Counted:
    """The model's own torch half, which counts the images that go through its tower."""

    def __init__(self, learner: Learner) -> None:
        self.num, self.rows = 0, 0
        encode = learner.forward.encode

        def count(patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
            self.num += len(grids)
            encoded_items = encode(patches, grids)
            self.rows += len(encoded_items)
            return encoded_items

        learner.forward.encode = count  # type: ignore[method-assign]


def learner_of(model: Path, store: MediaStore, train_vision: bool, cache_mb: int = 256) -> Learner:
    torch.manual_seed(0)
    config = making.trainer_config(feature_cache_mb=cache_mb)
    return making.build_learner(
        making.model_config(model, train_vision=train_vision), config, store, steps=10,
        algorithm=making.algorithm(kl_coef=0.1),
    )  # fmt: skip


def ready(learner: Learner, store: MediaStore, model: Path, step: int) -> ReadyBatch:
    """The same images at every step, in several micro-batches."""
    samples = making.samples(model, store, count=6, seed=5)
    materializer = Materializer(learner.family, store, 1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(96, 4096))
    made = preparer.prepare(Batch(step, samples), "")
    assert len(made.micro_batches) > 2 and made.num_items > 4
    return made


def test_frozen_tower_encodes_an_image_once_for_all_steps(
    tiny_model: Path, store: MediaStore
) -> None:
    learner = learner_of(tiny_model, store, train_vision=False)
    counted = Counted(learner)
    batches = [ready(learner, store, tiny_model, step) for step in (1, 2, 3)]
    for batch in batches:
        learner.step(batch)
    assert learner.features is not None and learner.reference is not None
    assert learner.features is learner.reference.features
    cache = learner.features.cache
    assert counted.num == batches[0].num_items == cache.encoded == len(cache)
    num_images = sum(len(m.batch.items) for batch in batches for m in batch.micro_batches)
    assert cache.hits == 2 * num_images - cache.encoded, "the model's and the reference's"
    assert cache.evicted == 0 and 0 < cache.bytes_held <= cache.maxsize


def test_feature_cache_does_not_change_any_bit(tiny_model: Path, store: MediaStore) -> None:
    losses = []
    for cache_mb, max_bytes in ((256, None), (0, None), (256, 3000)):
        learner = learner_of(tiny_model, store, train_vision=False, cache_mb=cache_mb)
        assert learner.features is not None
        if max_bytes is not None:
            learner.features.cache = FeatureCache(max_bytes)
        norms = [
            learner.step(ready(learner, store, tiny_model, step)).metrics["grad_norm"]
            for step in (1, 2, 3)
        ]
        weights = {n: p.detach().clone() for n, p in learner.forward.model.named_parameters()}
        losses.append((norms, weights, learner.features.cache))
    for norms, weights, _ in losses[1:]:
        assert norms == losses[0][0]
        assert all(weights[name].equal(tensor) for name, tensor in losses[0][1].items())
    _, none, some = (cache for _, _, cache in losses)
    assert len(none) == none.bytes_held == none.hits == 0
    assert some.evicted > 0 and 0 < some.bytes_held <= 3000


def test_pixels_are_copied_to_the_device_whole(
    tiny_model: Path, store: MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch knows page-locked memory by its first byte: of a part it would not know that it is
    still being copied when the next micro-batch wants the memory."""
    sent: list[np.ndarray] = []

    def copy(array: np.ndarray, device: torch.device) -> torch.Tensor:
        sent.append(array)
        return copy_to_device(array, device)

    monkeypatch.setattr(forward_pass, "copy_to_device", copy)
    learner = learner_of(tiny_model, store, train_vision=False)
    batch = ready(learner, store, tiny_model, 1).with_pixels()
    for micro_batch in batch.micro_batches:
        learner.score(micro_batch)
    pixels = {id(array) for array in sent if array.dtype == np.uint8}
    assert pixels and pixels <= {id(one.made) for one in batch.micro_batches}
