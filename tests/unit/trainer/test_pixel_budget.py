"""`[trainer] pixel_cache_mb` bounds a machine's memory for pixels, for any batch."""

from __future__ import annotations

import random
import threading
import weakref
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from sightline.algo.algorithm import AlgorithmLoss
from sightline.algo.losses import LossInputs
from sightline.errors import MediaError, ProcessFailed
from sightline.families import Family, load_renderer
from sightline.families.device_copy import allocate_rows, round_pinned
from sightline.media import MediaStore
from sightline.message import assistant, user
from sightline.pack import PackSize
from sightline.pixels import Materializer, Pixels
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.build import build_pixels
from sightline.trainer.feed import BatchPrefetcher, BatchPreparer
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.sft import build_sample
from sightline.wire import MediaItem
from sightline.wire.sample import Batch, Sample

IMAGE = 4 * 768
"""Bytes of the patches of an image of 32x32."""
BUDGET = 16 * IMAGE


def screens(model: Path, store: MediaStore, count: int, images: int) -> list[Sample]:
    """Return `count` samples with `images` images each."""
    renderer, rng = load_renderer(model, store), random.Random(0)
    talks = [
        [
            user(*(store.put(making.image(rng, 32, 32)) for _ in range(images)), "what"),
            assistant("A"),
        ]
        for _ in range(count)
    ]
    return [build_sample(talk, renderer, f"s{i}") for i, talk in enumerate(talks)]


class Live:
    """Counts the bytes of every array of patches while it exists."""

    def __init__(self, family: Family) -> None:
        self._family, self._lock = family, threading.Lock()
        self.now = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        return self._count(self._family.patches(image, item))

    def allocate(self, num: int, values: int) -> np.ndarray:
        return self._count(allocate_rows(num, values))

    def _count(self, array: np.ndarray) -> np.ndarray:
        self._add(array.nbytes)
        weakref.finalize(array, self._add, -array.nbytes)
        return array

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


class EagerMaterializer(Materializer):
    """Makes every item before `submit` returns: the least favourable order of the threads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_at_a_time = threading.Lock()

    def submit(self, item: MediaItem, keep: bool = True) -> Future[Pixels]:
        future = super().submit(item, keep)
        wait([future])
        # A pool's thread keeps its last result for a moment. It is released once all threads
        # have met.
        with self._one_at_a_time:
            meeting = threading.Barrier(self.threads + 1)
            for _ in range(self.threads):
                self._pool.submit(meeting.wait)
            meeting.wait()
        return future


def train(
    model: Path, store: MediaStore, samples: list[Sample], budget: int
) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return the weights after two steps, the peak of pixel bytes, and the number of images."""
    config = making.trainer_config()
    learner = making.build_learner(making.model_config(model), config, store, steps=10)
    live = Live(learner.family)
    materializer = EagerMaterializer(live, store, budget // 2, threads=2)
    pixels = MicroBatchPixels(materializer, budget // 2 * 7 // 8, live.allocate)
    unverified = BadMediaPolicy(allows_unverified_pixels=True)
    preparer = BatchPreparer(pixels, PackSize(1, 1), unverified)
    half = len(samples) // 2
    batches = (
        preparer.prepare(Batch(step, part), "")
        for step, part in enumerate((samples[:half], samples[half:]), start=1)
    )
    for ready in BatchPrefetcher(batches):
        learner.step(ready)
    materializer.close()
    num_decoded = materializer.counts.made
    return dict(learner.forward.model.named_parameters()), live.most, num_decoded


def test_batch_of_ten_times_the_pixel_budget_trains_bit_identically(
    tiny_model: Path, store: MediaStore
) -> None:
    samples = screens(tiny_model, store, 10 * 16 // 6 + 1, images=6)
    num = sum(len(sample.items) for sample in samples)
    small, metrics, num_made = train(tiny_model, store, samples, BUDGET)
    assert num * IMAGE > 10 * BUDGET and BUDGET // 2 < metrics <= BUDGET
    large, metrics, made_once = train(tiny_model, store, samples, 100 * BUDGET)
    assert made_once == num < num_made, "what did not fit was made again"
    assert metrics > 5 * BUDGET
    assert small.keys() == large.keys()
    assert all(torch.equal(small[name], large[name]) for name in small)


def test_page_locked_memory_counts_as_allocated_by_torch(
    tiny_model: Path, store: MediaStore
) -> None:
    learner = making.build_learner(
        making.model_config(tiny_model), making.trainer_config(), store, steps=10
    )
    learner.diagnostics_every = 1
    materializer = Materializer(learner.family, store, 0)
    pixels = MicroBatchPixels(materializer, is_pinned=True)
    unverified = BadMediaPolicy(allows_unverified_pixels=True)
    preparer = BatchPreparer(pixels, PackSize(1, 1), unverified)
    [one] = screens(tiny_model, store, 1, images=3)
    ready = preparer.prepare(Batch(1, [one]), "")
    assert learner.step(ready).probe is not None
    assert pixels.peak_bytes == round_pinned(3 * IMAGE) == 1 << 14, "a power of two"
    assert pixels._held_bytes == 0, "what a probe takes it gives back"
    materializer.close()


def test_image_with_other_sampler_pixels_refuses_the_batch_before_any_step(
    tiny_model: Path, store: MediaStore
) -> None:
    samples = making.samples(tiny_model, store, count=6)
    changed = next(sample for sample in reversed(samples) if sample.slots)
    slots = [msgspec.structs.replace(slot, pixel_digest="0" * 32) for slot in changed.slots[-1:]]
    samples[samples.index(changed)] = msgspec.structs.replace(
        changed, slots=[*changed.slots[:-1], *slots]
    )
    learner = making.build_learner(
        making.model_config(tiny_model), making.trainer_config(pixel_cache_mb=0), store, steps=10
    )
    pixels = build_pixels(learner, store)
    preparer = BatchPreparer(pixels, PackSize(160, 4096))
    with pytest.raises(MediaError, match="the sampler saw pixels 0000"):
        next(iter(BatchPrefetcher([preparer.prepare(Batch(1, samples), "")])))
    assert pixels.peak_bytes == 0, "no micro-batch was begun"
    pixels.materializer.close()


def test_next_micro_batch_is_prepared_during_compute_if_both_fit(
    tiny_model: Path, store: MediaStore
) -> None:
    learner = making.build_learner(
        making.model_config(tiny_model), making.trainer_config(), store, steps=10
    )
    image = 3 * IMAGE
    for room, is_ahead in ((3 * image, True), (image, False)):
        materializer = Materializer(learner.family, store, 0)
        pixels = MicroBatchPixels(materializer, room * 7 // 6 + 7)
        unverified = BadMediaPolicy(allows_unverified_pixels=True)
        preparer = BatchPreparer(pixels, PackSize(1, 1), unverified)
        ready = preparer.prepare(Batch(1, screens(tiny_model, store, 4, images=3)), "")
        ready.start_pixels()
        assert pixels.peak_bytes == (image if is_ahead else 0), "the first of the next batch"
        num_decoded = [micro_batch.made for _, micro_batch in ready.iterate_with_pixels()]
        assert pixels.peak_bytes == (2 * image if is_ahead else image)
        micro_batches = ready.with_pixels().micro_batches
        assert all(
            np.array_equal(a, b.made) for a, b in zip(num_decoded, micro_batches, strict=True)
        )
        materializer.close()


def test_out_of_memory_error_names_the_cause_and_the_fix(
    tiny_model: Path, store: MediaStore
) -> None:
    learner = making.build_learner(
        making.model_config(tiny_model), making.trainer_config(), store, 10
    )
    samples = making.samples(tiny_model, store, count=1, seed=5)  # which cannot be split
    materializer = Materializer(learner.family, store, 1 << 24)
    ready = BatchPreparer(MicroBatchPixels(materializer), PackSize(4096, 4096)).prepare(
        Batch(1, samples), ""
    )
    [micro_batch] = ready.micro_batches

    def fill_up(tokens: LossInputs) -> AlgorithmLoss:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 38.00 MiB. And so on.")

    learner.algorithm.loss = fill_up  # type: ignore[method-assign]
    with pytest.raises(ProcessFailed) as raised:
        learner.step(ready)
    assert f"of {len(micro_batch.batch.token_ids)} tokens and" in raised.value.problem
    assert f"{micro_batch.batch.num_patches} patches" in raised.value.problem
    assert "(CUDA out of memory)" in raised.value.problem
    assert "activation_checkpointing = true" in raised.value.fix
