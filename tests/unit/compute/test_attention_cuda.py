"""The block mask of a tree, compared with the mask of all pairs.

It is arithmetic and runs anywhere.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from shards import take_first

from sightline.compute.attention import TreePattern
from sightline.compute.attention_cuda import (
    BLOCK,
    FlexTreePattern,
    find_visible_blocks,
    pad_subtree_ends,
)

CPU = torch.device("cpu")


def random_ends(rng: random.Random, size: int) -> np.ndarray:
    """Return the ends of consecutive trees that branch at random."""
    ends = np.zeros(size, dtype=np.int64)

    def grow(start: int, stop: int) -> None:
        at = start
        while at < stop:
            trunk = min(stop, at + rng.randint(1, 200))
            end = rng.randint(trunk, stop)
            ends[at:trunk] = end
            grow(trunk, end)
            at = end

    grow(0, size)
    return ends


@pytest.mark.parametrize("seed", range(6))
def test_visible_blocks_match_the_full_mask(seed: int) -> None:
    rng = random.Random(seed)
    padded = pad_subtree_ends(random_ends(rng, rng.randint(300, 2500)))
    index = np.arange(len(padded))
    sees = (index <= index[:, None]) & (index[:, None] < padded)
    tiles = sees.reshape(-1, BLOCK, len(padded) // BLOCK, BLOCK)
    partial, whole = find_visible_blocks(padded)
    assert np.array_equal(whole, tiles.all(axis=(1, 3)))
    assert np.array_equal(partial | whole, tiles.any(axis=(1, 3)))
    assert not (partial & whole).any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", take_first(range(3), 1))
def test_flex_attention_matches_the_plain_mask(seed: int) -> None:
    torch.manual_seed(seed)
    ends = random_ends(random.Random(seed), 700)
    q, k, v = (torch.randn(1, heads, 700, 16) for heads in (4, 2, 2))
    with torch.compiler.set_stance("force_eager"):
        flex = FlexTreePattern(ends, CPU).attend(0, q, k, v, 0.3)
    plain = TreePattern(ends, CPU).attend(0, q, k, v, 0.3)
    torch.testing.assert_close(flex, plain, rtol=1e-5, atol=1e-5)
