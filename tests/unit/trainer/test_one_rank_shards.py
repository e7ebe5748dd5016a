"""Weights in float32, computed in bfloat16, on a single rank: gathered once a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import making
import pytest
import torch
import torch.distributed as dist

from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.shard import full_tensor
from sightline.trainer.step_result import MetricSums, StepTimer
from sightline.wire.sample import Batch


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def build(model: Path, store: MediaStore) -> tuple[Learner, ReadyBatch]:
    settings = making.trainer_config(device="cpu", master_dtype="float32", lr=1e-2)
    config = making.model_config(model, dtype="bfloat16")
    learner = making.build_learner(config, settings, store, steps=4)
    samples = making.samples(model, store, count=4)
    size = PackSize(max(len(sample.token_ids) for sample in samples), 1 << 20)
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), size)
    ready = preparer.prepare(Batch(1, samples), digest="").with_pixels()
    materializer.close()
    assert len(ready.micro_batches) > 2
    return learner, ready


def gradients(learner: Learner) -> list[torch.Tensor]:
    groups = learner.optimizer.param_groups
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    assert grads
    return [full_tensor(grad).clone() for grad in grads]


def test_step_gradients_match_separate_micro_batch_gradients(
    tiny_model: Path, store: MediaStore
) -> None:
    learner, ready = build(tiny_model, store)
    for micro_batch in ready.micro_batches:
        learner.backward(micro_batch, MetricSums(SUM_NAMES), StepTimer(learner.device))
    wanted = gradients(learner)
    learner, ready = build(tiny_model, store)
    learner.config = learner.config.model_copy(update={"max_grad_norm": 1e9})
    learner.step(ready)
    step_gradients = gradients(learner)
    assert all(
        torch.equal(micro_batch, other)
        for micro_batch, other in zip(wanted, step_gradients, strict=True)
    )


def test_parameters_are_gathered_again_after_an_update(tiny_model: Path, store: MediaStore) -> None:
    learner, ready = build(tiny_model, store)
    before = learner.score(ready.micro_batches[0])
    learner.step(ready)
    after = learner.score(ready.micro_batches[0])
    assert (before != after).any()
    other, _ = build(tiny_model, store)
    trained = dict(learner.forward.model.named_parameters())
    with torch.no_grad():
        for name, parameter in other.forward.model.named_parameters():
            full_tensor(parameter).copy_(full_tensor(trained[name]))
    assert (other.score(ready.micro_batches[0]) == after).all()
