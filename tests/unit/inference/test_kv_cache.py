"""A pass over several rows gives each sequence's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sightline.inference.torch_engine.kv_cache import KVCache
from sightline.inference.torch_engine.row_table import CHUNKS_PER_STEP, StepPlan, build_step_plan

HEADS, KV_HEADS, SIZE = 4, 2, 8


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one whole sequence (heads, tokens, size)."""
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=0.3, enable_gqa=True
    )[0]


@pytest.mark.parametrize("rows", [[0, 1, 2], [5, 0, 3]])
def test_chunked_and_single_token_attention_matches_whole_sequences(rows: list[int]) -> None:
    torch.manual_seed(0)
    lengths = [300, 9, 40]
    whole = [
        tuple(torch.randn(heads, n, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)) for n in lengths
    ]
    kv = KVCache(8, 512, torch.device("cpu"), torch.float32)
    outs: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    # Uneven chunks, idle rows, and single tokens together with long chunks.
    for step in ([100, 4, 7], [0, 1, 20], [150, 1, 1], [1, 1, 1], [49, 2, 11]):
        live = [i for i, count in enumerate(step) if count]
        plan = StepPlan(
            np.array([rows[i] for i in live]),
            np.array([done[i] for i in live]),
            np.array([step[i] for i in live]),
            np.zeros(len(live), dtype=bool),
        )
        parts = [[x[:, done[i] : done[i] + step[i]] for x in whole[i]] for i in live]
        q, k, v = (torch.cat([part[j] for part in parts], dim=1)[None] for j in range(3))
        out = kv.build_pattern(plan).attend(0, q, k, v, 0.3)[0]
        at = 0
        for i in live:
            outs[i].append(out[:, at : at + step[i]])
            at += step[i]
            done[i] += step[i]
    assert done == lengths
    for i in range(3):
        expected = plain(*whole[i])
        torch.testing.assert_close(torch.cat(outs[i], dim=1), expected, atol=1e-6, rtol=1e-5)


def test_every_decoding_row_gets_its_token_and_prompts_share_a_budget() -> None:
    chunk = 4
    length = np.array([50, 50, 3, 10, 2])
    computed = np.array([0, 49, 0, 9, 0])
    plan = build_step_plan(np.arange(5), length, computed, chunk, np.zeros(5, dtype=np.int64))
    assert plan.counts.tolist() == [4, 1, 3, 1, 2]
    assert plan.samples.tolist() == [False, True, True, True, True]
    rows, index = plan.flat()
    assert rows.tolist() == [0] * 4 + [1] + [2] * 3 + [3] + [4] * 2
    assert index.tolist() == [0, 1, 2, 3, 49, 0, 1, 2, 9, 0, 1]
    assert plan.last().tolist() == [4, 7, 8, 10]


def test_prompts_beyond_the_budget_wait_their_turn() -> None:
    chunk, many = 4, CHUNKS_PER_STEP + 3
    length = np.full(many, 9)
    computed = np.zeros(many, dtype=np.int64)
    computed[-1] = 8
    plan = build_step_plan(np.arange(many), length, computed, chunk, np.zeros_like(computed))
    assert plan.rows.tolist() == [*range(CHUNKS_PER_STEP), many - 1]
    assert plan.num_tokens == chunk * CHUNKS_PER_STEP + 1
