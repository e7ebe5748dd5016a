"""Every model type of the family: packs as it declares, computes what transformers computes, and
trains."""

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
from sightline.inference.server_spec import describe_prefix_reuse
from sightline.media import MediaRef, MediaStore
from sightline.message import assistant, user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer import sft
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.step_result import MetricSums, StepTimer
from sightline.wire import MediaItem, Slot
from sightline.wire.sample import Batch, Sample

TYPES = (
    "qwen3_vl", "qwen3_vl_thinking", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3", "qwen3_moe",
)  # fmt: skip
WHOLE, ALONE = PackSize(1 << 20, 1 << 20), PackSize(1, 1)
RECURRENT = ("qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("types") / kind
            write_tiny("qwen_vl", made[kind], seed=0, type=kind)
        return made[kind]

    return find


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest, folder: Callable[[str], Path]) -> Path:
    return folder(request.param)


def samples(model: Path, store: MediaStore, count: int, seed: int = 0) -> list[Sample]:
    if load_family(model).shows_media:
        return making.samples(model, store, count, seed)
    rng, renderer = random.Random(seed), load_renderer(model, store)
    made = []
    for i in range(count):
        talk = [user(" ".join(rng.choices(making.WORDS, k=rng.randint(1, 9))))]
        talk.append(assistant(" ".join(rng.choices(making.WORDS, k=rng.randint(1, 9)))))
        made.append(sft.build_sample(talk, renderer, f"t{i}"))
    return made


def build(model: Path, store: MediaStore) -> Learner:
    return making.build_learner(
        making.model_config(model), making.trainer_config(), store, steps=10
    )


def ready(learner: Learner, store: MediaStore, given: list[Sample], limit: PackSize) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(learner.family, materializer, limit)
    return preparer.prepare(Batch(1, given), digest="").with_pixels()


def backward(learner: Learner, batch: ReadyBatch) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Logprobs by trace, and all gradients as one vector."""
    learner.optimizer.zero_grad(set_to_none=True)
    found: dict[str, np.ndarray] = {}
    for micro_batch in batch.micro_batches:
        loss = learner.backward(micro_batch, MetricSums(SUM_NAMES), StepTimer(learner.device))
        for origin in micro_batch.batch.origins:
            part = loss.logprobs[origin.start : origin.stop].numpy()
            found[f"{origin.trace_id}.{origin.node}"] = part
    grads = [p.grad.flatten() for p in learner.forward.model.parameters() if p.grad is not None]
    return found, torch.cat(grads)


def test_packed_equals_unpacked(model: Path, store: MediaStore) -> None:
    learner = build(model, store)
    given = samples(model, store, count=6, seed=1)
    packed, alone = (ready(learner, store, given, limit) for limit in (WHOLE, ALONE))
    assert len(packed.micro_batches) == 1
    assert len(alone.micro_batches) == 6
    (logprobs, grads), (logprobs_alone, grads_alone) = (
        backward(learner, batch) for batch in (packed, alone)
    )
    assert logprobs.keys() == logprobs_alone.keys()
    for key, found in logprobs.items():
        np.testing.assert_allclose(found, logprobs_alone[key], atol=1e-5)
    assert float((grads - grads_alone).norm() / grads_alone.norm()) < 1e-5


def test_logprobs_are_those_of_plain_transformers(model: Path, store: MediaStore) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    learner = build(model, store)
    sees = learner.family.shows_media
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    plain = auto.from_pretrained(model, dtype=torch.float32)
    given = samples(model, store, count=3, seed=7)
    assert not sees or any(sample.slots for sample in given)
    ours = learner.step(ready(learner, store, given, WHOLE)).scores
    by_trace: dict[str, list[np.ndarray]] = {}
    for origin in ours.origins:
        part = ours.logprobs.numpy()[origin.start : origin.stop]
        by_trace.setdefault(origin.trace_id, []).append(part)
    for sample in given:
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


def test_what_a_turn_finds_of_the_one_before_is_said_with_a_reason(model: Path) -> None:
    line = describe_prefix_reuse(load_family(model))
    assert line.startswith("prefix cache: on, ")
    assert ("because" in line) == (model.name in RECURRENT)


def test_text_only_takes_no_pixel_settings_and_no_slots(
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
