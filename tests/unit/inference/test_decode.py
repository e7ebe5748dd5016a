"""Decoding in passes of fixed shape says what decoding row by row says."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.families import load_family, load_renderer
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.decode import CudaGraphDecoder, round_up_shape
from sightline.inference.torch_engine.engine import build_engine
from sightline.inference.torch_engine.request import TorchRequest
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams

LENGTHS = (5, 300, 17, 40, 9, 120, 3)


def answers(model: Path, store: MediaStore, in_passes: bool) -> tuple[list[TorchRequest], int]:
    """Answers of different length to prompts of different length, two at first and then more, so
    that rows fall idle, are taken again, and outgrow their table."""
    family = load_family(model)
    banned = load_renderer(model, store, family).pad_token_ids
    settings = ServerSpec.of(
        path=model, media_roots=(store.root,), device="cpu", max_num_seqs=32, max_model_len=1024
    )
    engine = build_engine(settings, family, Materializer(family, store, 1 << 20), banned)
    runner = engine.runner
    decoder = CudaGraphDecoder(
        runner.forward, runner.kv, engine.scheduler.rows, torch.device("cpu")
    )
    if in_passes:
        runner.decoder = decoder
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
    return requests, decoder.num_passes


@pytest.mark.parametrize("type", ["qwen3_vl", "qwen2_5_vl"])
def test_passes_of_fixed_shape_say_the_same(type: str, tmp_path: Path, store: MediaStore) -> None:
    from sightline.families.registry import write_tiny

    # Two heads share their keys, as in the models that people serve.
    write_tiny("qwen_vl", tmp_path / "model", seed=0, type=type, kv_heads=1)
    plain, _ = answers(tmp_path / "model", store, in_passes=False)
    passed, num_passes = answers(tmp_path / "model", store, in_passes=True)
    assert num_passes > 100
    for one, other in zip(plain, passed, strict=True):
        assert one.error is None and one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_shapes_are_few() -> None:
    assert [round_up_shape(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 64, 65)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 64, 96,
    ]  # fmt: skip
    assert len({round_up_shape(n) for n in range(1, 4097)}) == 24
