"""Requests with one prompt compute it once, and give the same answers as alone."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.inference.torch_engine.kv_cache import BLOCK_SIZE, KVCache
from sightline.inference.torch_engine.prefix_cache import PromptRows
from sightline.inference.torch_engine.row_table import StepPlan, TorchRequest
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams

LENGTH = 2 * BLOCK_SIZE + 22


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "recurrent"
    write_tiny("qwen_vl", path, seed=0, type="qwen3_5", initializer_std=0.1)
    return path


def build(model: Path, store: MediaStore, in_pages: bool, shares: bool) -> TorchEngine:
    family = load_family(model)
    banned = load_renderer(model, store, family).pad_token_ids
    spec = ServerSpec.of(
        path=model, media_roots=(store.root,), device="cpu", max_num_seqs=8, max_model_len=256,
        prefill_chunk_tokens=40, enable_prefix_caching=shares,
    )  # fmt: skip
    engine = build_engine(spec, family, Materializer(family, store, 1 << 20), banned)
    if in_pages:
        engine.runner.use_kv_cache(KVCache(8, 256, torch.device("cpu"), torch.float32))
    return engine


def ask(engine: TorchEngine, batches: list[list[TorchRequest]]) -> None:
    done: queue.SimpleQueue[list[TorchRequest]] = queue.SimpleQueue()
    engine.start(done.put)
    try:
        for batch in batches:
            engine.submit(batch)
            left = len(batch)
            while left:
                left -= len(done.get(timeout=60))
    finally:
        engine.stop()
        engine.join(20)


def make_group() -> list[TorchRequest]:
    prompt = np.arange(LENGTH, dtype=np.int32) % 250
    return [
        TorchRequest(prompt, [], [], SamplingParams(max_tokens=30 + i), seed=i) for i in range(4)
    ]


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_group_computes_its_prompt_once(
    in_pages: bool, tiny_model: Path, store: MediaStore
) -> None:
    engine, apart = build(tiny_model, store, in_pages, True), make_group()
    group, later = make_group(), make_group()[:1]
    ask(engine, [group, later])
    # Each computes the last token itself. A request that comes later finds the prompt cached.
    assert engine.counters.computed_tokens == LENGTH + 4
    assert engine.counters.computed_keys == LENGTH * (LENGTH + 1) // 2 + 4 * LENGTH
    assert [r.cached_tokens for r in (*group, *later)] == [0] + 4 * [LENGTH - 1]
    ask(build(tiny_model, store, in_pages, False), [apart])
    for one, other in zip((*group, *later), (*apart, apart[0]), strict=True):
        assert one.error is None and one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_group_reuses_the_state_only_at_the_prompt_end(recurrent: Path, store: MediaStore) -> None:
    engine, apart = build(recurrent, store, False, True), make_group()
    group, later = make_group(), make_group()
    ask(engine, [group, later])
    # The finished requests' state has advanced, so the first of the others computes its own.
    assert [r.cached_tokens for r in (*group, *later)] == 2 * [0, *3 * [LENGTH - 1]]
    assert engine.counters.computed_tokens == 2 * (LENGTH + 3)
    ask(build(recurrent, store, False, False), [apart])
    for one, other in zip((*group, *later), (*apart, *apart), strict=True):
        assert one.error is None and one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", ["tiny_model", "recurrent"])
def test_group_survives_the_request_that_computes_its_prompt(
    kind: str, store: MediaStore, request: pytest.FixtureRequest
) -> None:
    model, in_pages = request.getfixturevalue(kind), kind == "tiny_model"
    engine, group, apart = build(model, store, in_pages, True), make_group(), make_group()
    ask(build(model, store, False, False), [apart])
    engine.submit(group)
    with torch.inference_mode():
        engine._run_once()
        computed = engine.scheduler.rows.computed[group[0].row]
        assert 0 < computed < LENGTH and len(engine.scheduler.loading) == 3
        engine.cancel(group[0])
        while engine._run_once():
            pass
    # Discarded tokens, the prompt again, and the last token of the requests that share it.
    assert engine.counters.computed_tokens == computed + LENGTH + 2
    for one, other in list(zip(group, apart, strict=True))[1:]:
        assert one.error is None and one.tokens == other.tokens


def plan(rows: list[int], starts: list[int], ends: list[int]) -> StepPlan:
    counts = np.array(ends) - np.array(starts)
    return StepPlan(np.array(rows), np.array(starts), counts, np.zeros(len(rows), dtype=bool))


def count_used_pages(kv: KVCache) -> int:
    return len(kv._num_users) - len(kv._free)


def test_full_pages_are_shared_and_freed_with_their_last_row() -> None:
    kv = KVCache(4, 4 * BLOCK_SIZE, torch.device("cpu"), torch.float32)
    kv.reserve(plan([0], [0], [LENGTH]))
    assert count_used_pages(kv) == 3
    tokens = torch.arange(LENGTH, dtype=torch.float32).view(-1, 1, 1)
    keys, values = kv.pages(0, tokens, tokens)
    for table in (keys, values):
        places = kv.find_places(np.zeros(LENGTH, dtype=np.int64), np.arange(LENGTH))
        table.flatten(0, 1)[torch.from_numpy(places)] = tokens
    kv.share_prefix(0, 2, LENGTH - 1)
    assert count_used_pages(kv) == 4
    assert (kv.block_tables[2, :2] == kv.block_tables[0, :2]).all() and kv.block_tables[
        2, 2
    ] != kv.block_tables[0, 2]
    kv.reserve(plan([2], [LENGTH - 1], [LENGTH + BLOCK_SIZE]))
    places = kv.find_places(np.full(LENGTH - 1, 2), np.arange(LENGTH - 1))
    assert torch.equal(keys.flatten(0, 1)[torch.from_numpy(places)], tokens[:-1])
    kv.free_row(0)
    assert count_used_pages(kv) == 4
    # A row that is computed from the start writes to no shared page.
    kv.share_prefix(2, 1, 2 * BLOCK_SIZE)
    kv.reserve(plan([1], [0], [BLOCK_SIZE]))
    assert kv.block_tables[1, 0] not in kv.block_tables[2, :4]
    for row in (1, 2):
        kv.free_row(row)
    assert count_used_pages(kv) == 0


def test_memory_grows_with_the_token_count() -> None:
    kv = KVCache(256, 32768, torch.device("cpu"), torch.float32)
    kv.reserve(plan([0, 1], [0, 0], [100, 5]))
    before = kv.generation
    for end in range(101, 2000):
        kv.reserve(plan([0], [end - 1], [end]))
    assert count_used_pages(kv) == -(-1999 // BLOCK_SIZE) + 1 and kv.generation == before
    kv.reserve(plan([2], [0], [32768]))
    assert kv.generation == before + 1


def test_prompt_is_found_until_its_row_is_forgotten() -> None:
    prompts, key = PromptRows(), (b"tokens", ((1, "image"),))
    prompts.add(3, key, {"image": "digest"})
    prompts.add(5, key, {})
    assert prompts.get(key) == (3, {"image": "digest"})
    assert prompts.get((b"tokens", ((1, "other"),))) is None
    prompts.forget(5)
    prompts.forget(3)
    assert prompts.get(key) is None
