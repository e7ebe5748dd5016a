"""The engine reports the experts of every token, also of tokens in its prefix cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline.compute.attention import PackedPattern
from sightline.compute.feature_cache import FeatureCache
from sightline.compute.model import load_model
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.inference.torch_engine.kv_cache import KVCache
from sightline.inference.torch_engine.model_runner import WholeRowRunner
from sightline.inference.torch_engine.row_table import RowTable, StepPlan, TorchRequest
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen_vl", {"type": "qwen3_moe"}),
    "qwen3_5_moe": ("qwen_vl", {"type": "qwen3_5_moe"}),
    "kimi_k25": ("kimi_k25", {}),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = KINDS[request.param]
    path = tmp_path_factory.mktemp("models") / str(request.param)
    write_tiny(family, path, seed=0, **options)
    return path


def build(model: Path, store: MediaStore, in_passes: bool) -> TorchEngine:
    family = load_family(model)
    banned = load_renderer(model, store, family).pad_token_ids
    spec = ServerSpec.of(
        path=model, media_roots=(store.root,), device="cpu", max_num_seqs=4, max_model_len=512,
        prefill_chunk_tokens=16,
    )  # fmt: skip
    engine = build_engine(spec, family, Materializer(family, store, 1 << 20), banned)
    if in_passes:
        engine.runner.use_kv_cache(KVCache(4, 512, torch.device("cpu"), torch.float32))
    return engine


def ask(prompt: Sequence[int], first: int | None = 0, seed: int = 0) -> TorchRequest:
    params = SamplingParams(max_tokens=9, routes_from=first)
    return TorchRequest(np.array(prompt, dtype=np.int32), [], [], params, seed=seed)


def answer(engine: TorchEngine, ask_all: Callable[[], Iterator[list[TorchRequest]]]) -> None:
    """Answer one batch of requests after the other."""
    done = threading.Semaphore(0)

    def count(finished: list[TorchRequest]) -> None:
        for _ in finished:
            done.release()

    engine.start(count)
    try:
        for batch in ask_all():
            engine.submit(batch)
            for _ in batch:
                assert done.acquire(timeout=60)
            assert all(request.error is None for request in batch)
    finally:
        engine.stop()
        engine.join(20)


@torch.no_grad()
def compute_routes(model: Path, tokens: Sequence[int]) -> np.ndarray:
    """Return the routes of a plain forward pass over one sequence."""
    family = load_family(model)
    forward: Any = load_model(model, family, "cpu", "float32")
    positions = torch.arange(len(tokens)).expand(family.num_axes, 1, -1)
    pattern = PackedPattern([len(tokens)], torch.device("cpu"))
    forward.hidden(torch.tensor([tokens]), positions, None, None, pattern)
    routes: np.ndarray = forward.routing.get_routes().numpy()
    return routes


@pytest.mark.parametrize("in_passes", [False, True])
def test_answer_reports_the_routes_of_its_tokens(
    model: Path, store: MediaStore, in_passes: bool
) -> None:
    engine = build(model, store, in_passes and "3_5" not in model.name)
    prompts = [[*range(20, 20 + num)] for num in (3, 40, 21)]
    first = [ask(prompt, seed=i) for i, prompt in enumerate(prompts)]
    # The same prompt twice: one row computes it, and the other shares it.
    first.append(ask(prompts[1], seed=7))
    second: list[TorchRequest] = []

    def ask_all() -> Iterator[list[TorchRequest]]:
        yield first
        second.extend(ask([*r.prompt.tolist(), *r.tokens, 5, 6]) for r in first)
        second.append(ask(second[1].prompt.tolist(), first=45))
        yield second

    answer(engine, ask_all)
    assert all(request.cached_tokens for request in second[:3])
    assert first[3].cached_tokens
    for request in (*first, *second):
        tokens = [*request.prompt.tolist(), *request.tokens]
        begin = request.params.routes_from
        assert request.routes is not None and begin is not None
        wanted = compute_routes(model, tokens)[begin:-1]
        assert request.routes.dtype == wanted.dtype
        np.testing.assert_array_equal(np.sort(request.routes), np.sort(wanted))


def test_answer_without_routes_from_reports_none(model: Path, store: MediaStore) -> None:
    engine, request = build(model, store, False), ask(range(9), first=None)
    answer(engine, lambda: iter([[request]]))
    assert request.tokens and request.routes is None


def test_rows_without_a_kv_cache_report_no_routes(tmp_path: Path, store: MediaStore) -> None:
    write_tiny("qwen_vl", tmp_path, seed=0, type="qwen3_moe")
    family = load_family(tmp_path)
    rows = RowTable(4, 512, family.num_axes)
    rows.tokens[1, :9] = range(20, 29)
    forward = load_model(tmp_path, family, "cpu", "float32")
    runner = WholeRowRunner(forward, family, FeatureCache(0), rows, (), False)
    one = np.ones(1, dtype=np.int64)
    with torch.inference_mode():
        hidden = runner.hidden(StepPlan(one, 0 * one, 9 * one, one > 0), {})
    assert len(hidden) == 9 and runner.routing is None
