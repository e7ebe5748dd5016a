"""A bfloat16 model trains through float32 masters of its weights."""

from __future__ import annotations

from pathlib import Path

import exactness
import making
import pytest
import torch

from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.step_result import MetricSums

STEPS = 20
SMALL_LR = 1e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("masters") / "model"
    write_tiny("qwen_vl", path, seed=0, dtype="bfloat16")
    return path


def build(model: Path, store: MediaStore, **trainer: object) -> tuple[Learner, ReadyBatch]:
    """Return a learner, and a batch of several micro-batches."""
    config = making.model_config(model, dtype="bfloat16")
    learner = making.build_learner(config, making.trainer_config(**trainer), store, steps=STEPS)
    samples = making.samples(model, store, count=4)
    longest = max(len(sample.token_ids) for sample in samples)
    ready = exactness.prepare(learner, model, store, samples, longest, step=1)
    assert len(ready.micro_batches) > 2
    return learner, ready


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    optimizer, model = learner.optimizer, learner.forward.model
    return {name: optimizer.get_master(p) for name, p in model.named_parameters()}


def test_gradients_of_micro_batches_are_summed_in_float32(model: Path, store: MediaStore) -> None:
    learner, ready = build(model, store)
    wanted: dict[str, torch.Tensor] = {}
    for micro_batch in ready.micro_batches:
        learner.optimizer.zero_grad()
        learner.backward(micro_batch, MetricSums(SUM_NAMES))
        assert all(p.grad is None for p in learner.forward.model.parameters()), "freed"
        for name, master in masters(learner).items():
            gradient = master.grad
            assert torch.equal(gradient, gradient.bfloat16().float()), "computed in bfloat16"
            wanted[name] = wanted[name] + gradient if name in wanted else gradient
    learner.optimizer.zero_grad()
    for micro_batch in ready.micro_batches:
        learner.backward(micro_batch, MetricSums(SUM_NAMES))
    for name, master in masters(learner).items():
        assert torch.equal(master.grad, wanted[name]), name


def test_model_computes_with_the_rounded_masters_of_its_last_step(
    model: Path, store: MediaStore
) -> None:
    learner, ready = build(model, store, lr=1e-3)
    for _ in range(2):
        learner.step(ready)
        for name, parameter in learner.forward.model.named_parameters():
            master = masters(learner)[name]
            assert parameter.dtype == torch.bfloat16 and master.dtype == torch.float32
            assert torch.equal(parameter, master.bfloat16()), name
            assert not torch.equal(parameter.float(), master), name


def test_masters_keep_updates_that_rounding_would_lose(model: Path, store: MediaStore) -> None:
    changed = {}
    for master_dtype in ("float32", "model"):
        learner, ready = build(model, store, lr=SMALL_LR, master_dtype=master_dtype)
        before = torch.cat([p.detach().flatten() for p in learner.forward.model.parameters()])
        for _ in range(STEPS):
            learner.step(ready)
        after = torch.cat([p.detach().flatten() for p in learner.forward.model.parameters()])
        changed[master_dtype] = float((before != after).float().mean())
    print(f"share of weights that changed in {STEPS} steps at lr {SMALL_LR}: {changed}")
    assert changed["float32"] > 0.1 and changed["model"] < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_without_masters_are_updated_themselves(
    model: Path, store: MediaStore, dtype: str
) -> None:
    config = making.model_config(model, dtype=dtype)
    trainer = making.trainer_config(master_dtype="model")
    learner = making.build_learner(config, trainer, store, steps=STEPS)
    for name, parameter in learner.forward.model.named_parameters():
        assert masters(learner)[name] is parameter
