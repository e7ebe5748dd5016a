"""Decoding in passes of fixed shape equals decoding row by row."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shards import take_first

from sightline.families import load_family, load_renderer
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.decode import CudaGraphDecoder, round_up_shape
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.inference.torch_engine.kv_cache import KVCache
from sightline.inference.torch_engine.row_table import RowTable, StepPlan, TorchRequest
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams

LENGTHS = (5, 300, 17, 40, 9, 120, 3)


def build(model: Path, store: MediaStore) -> TorchEngine:
    family = load_family(model)
    banned = load_renderer(model, store, family).pad_token_ids
    settings = ServerSpec.of(
        path=model, media_roots=(store.root,), device="cpu", max_num_seqs=32, max_model_len=1024
    )
    return build_engine(settings, family, Materializer(family, store, 1 << 20), banned)


def answers(model: Path, store: MediaStore, in_passes: bool) -> tuple[list[TorchRequest], int]:
    """Answers of different length to prompts of different length, two at first and then more, so
    that rows fall idle, are taken again, and outgrow their table."""
    engine = build(model, store)
    runner = engine.runner
    if in_passes:
        runner.use_kv_cache(KVCache(32, 1024, torch.device("cpu"), torch.float32))
    requests = [
        TorchRequest(
            np.arange(i, i + length, dtype=np.int32) % 250,
            [],
            [],
            SamplingParams(max_tokens=20 + 30 * (i % 3), temperature=float(i % 2), top_k=i),
            seed=i,
        )
        for i, length in enumerate(LENGTHS)
    ]
    done = threading.Semaphore(0)
    engine.start(lambda finished: [done.release() for _ in finished])  # type: ignore[func-returns-value]
    try:
        for batch in (requests[:2], requests[2:]):
            engine.submit(batch)
            for _ in batch:
                assert done.acquire(timeout=60)
    finally:
        engine.stop()
        engine.join(20)
    return requests, 0 if runner.decoder is None else runner.decoder.num_passes


@pytest.mark.parametrize("type", take_first(["qwen3_vl", "qwen2_5_vl"], 1))
def test_fixed_shape_passes_match_plain_ones(type: str, tmp_path: Path, store: MediaStore) -> None:
    from sightline.families.registry import write_tiny

    # Two heads share their keys, as in published models.
    write_tiny("qwen_vl", tmp_path / "model", seed=0, type=type, kv_heads=1)
    plain, _ = answers(tmp_path / "model", store, in_passes=False)
    passed, num_passes = answers(tmp_path / "model", store, in_passes=True)
    assert num_passes > 100
    for plain_answer, other in zip(plain, passed, strict=True):
        assert plain_answer.error is None and plain_answer.tokens == other.tokens
        np.testing.assert_allclose(plain_answer.logprobs, other.logprobs, atol=1e-5)


def test_shapes_are_rounded_to_powers_of_two() -> None:
    assert [round_up_shape(n) for n in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]


def test_engine_reports_its_step_time(tiny_model: Path, store: MediaStore) -> None:
    engine = build(tiny_model, store)
    step, is_in_step, goes_on, done = engine.runner.step, *(threading.Event() for _ in range(3))

    def hang(*args: Any) -> Any:
        is_in_step.set()
        assert goes_on.wait(60)
        return step(*args)

    engine.runner.step = hang  # type: ignore[method-assign]
    engine.start(lambda finished: done.set())
    try:
        assert engine.step_s < 60
        params = SamplingParams(max_tokens=1, temperature=0.0)
        engine.submit([TorchRequest(np.arange(3, dtype=np.int32), [], [], params, seed=0)])
        assert is_in_step.wait(60)
        before = engine.step_s
        time.sleep(0.05)
        assert engine.step_s >= before + 0.05
        goes_on.set()
        assert done.wait(60)
        while engine.step_s:  # the turn in which there is nothing to do
            time.sleep(0.005)
    finally:
        goes_on.set()
        engine.stop()
        engine.join(20)


def plan_of(length: int) -> StepPlan:
    return StepPlan(np.array([0]), np.array([0]), np.array([length]), np.array([True]))


def test_graphs_are_recaptured_after_a_failed_growth() -> None:
    kv = KVCache(2, 1 << 20, torch.device("cpu"), torch.float32)
    kv.reserve(plan_of(64))
    keys, _ = kv.pages(0, torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    keys.fill_(3.0)
    # This layer does not fit when it grows, after the previous one was moved.
    huge = torch.zeros(1).expand(len(keys), 64, 1 << 40, 2)
    kv._keys[1] = huge
    before = kv.generation
    with pytest.raises(RuntimeError):
        kv.reserve(plan_of(1 << 16))
    moved = kv._keys[0]
    assert moved.data_ptr() != keys.data_ptr() and kv.generation != before
    assert (moved[: len(keys)] == 3.0).all()


@pytest.mark.parametrize("hides", [False, True])
def test_full_device_does_not_disable_graphs(hides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def capture(*args: object, **options: object) -> Iterator[None]:
        try:
            yield
        finally:
            if hides:
                raise RuntimeError("operation failed due to a previous error during capture")

    class FullForward:
        def hidden(self, *args: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for name in ("CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    kv, rows = KVCache(2, 128, torch.device("cpu"), torch.float32), RowTable(2, 128, 1)
    decoder = CudaGraphDecoder(FullForward(), kv, rows, torch.device("cpu"))  # type: ignore[arg-type]
    decoder_pass = decoder._get_pass(1, 16)
    decoder._captures, decoder._pool = True, None  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        decoder._capture(decoder_pass)
    assert decoder._captures and decoder_pass.graph is None
