"""A step on a real device: synchronizations and transfers."""

from __future__ import annotations

from pathlib import Path

import making
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from sightline.compute import attention_cuda, attention_cudnn
from sightline.compute.attention import build_attention_pattern
from sightline.compute.tensor_file import HostCopy
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.step_result import MetricSums, StepTimer
from sightline.wire.sample import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]


def test_host_copy_is_page_locked_and_keeps_device_values() -> None:
    weights = {"a": torch.randn(2048, 2048, device="cuda"), "b": torch.arange(9, device="cuda")}
    wanted = weights["a"].to(torch.bfloat16).cpu()
    copy = HostCopy()
    torch.cuda._sleep(200_000_000)
    copy.take(weights, dtype=torch.bfloat16)
    weights["a"].zero_()  # asked for after the copy, which has not happened yet
    tensors = copy.tensors()
    assert tensors["a"].is_pinned() and tensors["a"].equal(wanted)
    assert tensors["b"].equal(torch.arange(9))
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    copy.take(weights, dtype=torch.bfloat16)
    assert {name: tensor.data_ptr() for name, tensor in copy.tensors().items()} == places


def test_step_timer_measures_device_time() -> None:
    step_timer = StepTimer(torch.device("cuda"))
    torch.cuda._sleep(100_000_000)
    step_timer.end("forward")
    step_timer.end("backward")
    seconds = step_timer.seconds()
    assert seconds["forward"] > 10 * seconds["backward"]


def test_measuring_a_micro_batch_does_not_synchronize() -> None:
    device = torch.device("cuda")
    num = 5000
    loss = torch.ones((), device=device)
    metric_sums, step_timer = MetricSums(SUM_NAMES), StepTimer(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        build_attention_pattern(np.full(num, num), device, torch.bfloat16)
        metric_sums.add("loss", loss)
        step_timer.end("forward")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metric_sums.read()["loss"] == 1.0


@pytest.fixture(params=["qwen_vl", "kimi_k25", "glm_v"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tiny(request.param, tmp_path / "model", seed=0)
    return tmp_path / "model"


def learner_of(model: Path, store: MediaStore, **changes: object) -> Learner:
    settings = making.trainer_config(device="cuda", master_dtype="model", **changes)
    return making.build_learner(
        making.model_config(model, dtype="bfloat16"), settings, store, steps=4
    )


def batch_of(learner: Learner, model: Path, store: MediaStore) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))
    ready = preparer.prepare(
        Batch(1, making.samples(model, store, count=3)), digest=""
    ).with_pixels()
    materializer.close()
    return ready


def test_micro_batch_does_not_synchronize_with_the_device(model: Path, store: MediaStore) -> None:
    learner = learner_of(model, store)
    ready = batch_of(learner, model, store)
    learner.step(ready)  # what is found out once, and kernels that are loaded
    metric_sums = MetricSums(SUM_NAMES)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.backward(ready.micro_batches[0], metric_sums)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(metric_sums.read()["loss"])


def test_kernel_trials_work_during_activation_recomputation(model: Path, store: MediaStore) -> None:
    norms = []
    for again in (True, False):
        attention_cuda._try_cudnn.cache_clear()
        learner = learner_of(model, store, activation_checkpointing=again)
        norms.append(learner.step(batch_of(learner, model, store)).metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["flat", "tree"])
def test_compiled_blocks_match_plain_ones(
    tiny_model: Path,
    store: MediaStore,
    kind: str,
    again: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rows are padded for cuDNN from the first on, so that the compiler sees that too.
    for name in ("MIN_TOKENS", "MIN_SHAPE_REPEATS"):
        monkeypatch.setattr(attention_cudnn, name, 1)
    torch._dynamo.reset()
    counters.clear()
    norms = []
    for backend in ("", "inductor"):
        learner = learner_of(
            tiny_model, store, compile_backend=backend, activation_checkpointing=again
        )
        grad_norms = []
        for seed in range(4):
            draw = making.samples if kind == "flat" else making.group
            materializer = Materializer(learner.family, store, max_bytes=1 << 24)
            preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))
            samples = draw(tiny_model, store, 4 + seed, seed=seed)
            ready = preparer.prepare(Batch(1 + seed, samples), digest="").with_pixels()
            materializer.close()
            grad_norms.append(learner.step(ready).metrics["grad_norm"])
        norms.append(grad_norms)
    assert norms[0] == pytest.approx(norms[1], rel=5e-2)
    assert not counters["graph_break"], "a block is one graph"
