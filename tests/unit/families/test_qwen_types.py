"""Every model type of the family: packing, results equal to transformers, and training."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch

from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.media import MediaRef, MediaStore
from sightline.message import assistant, user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer import sft
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire import MediaItem, Slot
from sightline.wire.sample import Batch, Sample

TYPES = (
    "qwen3_vl", "qwen3_vl_thinking", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3", "qwen3_moe",
)  # fmt: skip
WHOLE = PackSize(1 << 20, 1 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("types") / kind
            write_tiny("qwen_vl", folders[kind], seed=0, type=kind)
        return folders[kind]

    return find


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest, folder: Callable[[str], Path]) -> Path:
    return folder(request.param)


def samples(model: Path, store: MediaStore, count: int, seed: int = 0) -> list[Sample]:
    if load_family(model).shows_media:
        return making.samples(model, store, count, seed)
    rng, renderer = random.Random(seed), load_renderer(model, store)
    built = []
    for i in range(count):
        talk = [user(" ".join(rng.choices(making.WORDS, k=rng.randint(1, 9))))]
        talk.append(assistant(" ".join(rng.choices(making.WORDS, k=rng.randint(1, 9)))))
        built.append(sft.build_sample(talk, renderer, f"t{i}"))
    return built


def build(model: Path, store: MediaStore) -> Learner:
    return making.build_learner(
        making.model_config(model), making.trainer_config(), store, steps=10
    )


def ready(
    learner: Learner, store: MediaStore, drawn_samples: list[Sample], limit: PackSize
) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), limit)
    return preparer.prepare(Batch(1, drawn_samples), digest="").with_pixels()


def test_logprobs_match_plain_transformers(model: Path, store: MediaStore) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    learner = build(model, store)
    sees = learner.family.shows_media
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    plain = auto.from_pretrained(model, dtype=torch.float32)
    drawn_samples = samples(model, store, count=3, seed=7)
    assert not sees or any(sample.slots for sample in drawn_samples)
    ours = learner.step(ready(learner, store, drawn_samples, WHOLE)).scores
    by_trace: dict[str, list[np.ndarray]] = {}
    for origin in ours.origins:
        part = ours.logprobs.numpy()[origin.start : origin.stop]
        by_trace.setdefault(origin.trace_id, []).append(part)
    for sample in drawn_samples:
        theirs = plain_logprobs(plain, sample, learner, store)
        np.testing.assert_allclose(np.concatenate(by_trace[sample.trace_id]), theirs, atol=2e-5)


def plain_logprobs(
    model: torch.nn.Module, sample: Sample, learner: Learner, store: MediaStore
) -> np.ndarray:
    ids = torch.from_numpy(sample.token_ids.numpy().astype(np.int64))[None]
    inputs: dict[str, torch.Tensor] = {"input_ids": ids}
    if sample.slots:
        family: Any = learner.family
        items = [sample.items[slot.item] for slot in sample.slots]
        rows = [family.rows(family.patches(store.image(i.ref), i)) for i in items]
        inputs["pixel_values"] = torch.from_numpy(np.concatenate(rows))
        inputs["image_grid_thw"] = torch.tensor([i.grid for i in items])
        inputs["mm_token_type_ids"] = torch.isin(ids, torch.tensor(family.slot_token_ids)).int()
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    logits[:, list(learner.pad_ids)] = float("-inf")
    trained = torch.from_numpy(sample.trained.numpy().astype(np.int64))
    logs = torch.log_softmax(logits[trained - 1], dim=-1)
    return logs.gather(-1, ids[0][trained, None]).squeeze(-1).numpy()


def test_text_only_model_refuses_pixel_settings_and_slots(
    folder: Callable[[str], Path], store: MediaStore
) -> None:
    from sightline import FamilyError, Misaligned

    model = folder("qwen3")
    with pytest.raises(FamilyError, match="min_pixels"):
        load_family(model, min_pixels=4096)
    family = load_family(model)
    with pytest.raises(Misaligned):
        item = MediaItem(MediaRef("0" * 64, "image/png", 1, 1, 1), "qwen_vl", (1, 2, 2), "f")
        family.positions(4, [Slot(0, 1, item)])
    sample = samples(model, store, 1)[0]
    assert sample.items == [] and sample.slots == []
