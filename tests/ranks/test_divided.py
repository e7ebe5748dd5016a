"""Ranks that divide experts or matrices give one rank's results. Checkpoints fit every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_steps import Found, check_equal, find_error, record, run_ranks

from sightline.families.registry import write_tiny
from sightline.trainer.snapshot import MODEL, OPTIMIZER, ShardReader

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
KINDS = {
    "qwen3_vl": ("qwen_vl", {"type": "qwen3_vl"}),
    "qwen2_5_vl": ("qwen_vl", {"type": "qwen2_5_vl"}),
    "qwen3_vl_moe": ("qwen_vl", {"type": "qwen3_vl_moe"}),
    "qwen3_5_moe": ("qwen_vl", {"type": "qwen3_5_moe"}),
    "kimi_k25": ("kimi_k25", {}),
}
IN_CI = ["qwen3_vl_moe 4 expert=2", "qwen3_vl 2 tensor=2"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in IN_CI else [pytest.mark.thorough])
        for case in (
            # Two groups: FSDP shards each rank's experts.
            "qwen3_vl_moe 4 expert=2",
            "qwen3_vl_moe 2 expert=2 routes",
            "qwen3_vl_moe 2 expert=2 recompute",
            "qwen3_vl_moe 4 expert=4 one",  # ranks without a micro-batch
            "qwen3_vl_moe 4 expert=2 context=2",
            "qwen3_5_moe 2 expert=2",
            "qwen3_5_moe 4 expert=4",
            "kimi_k25 2 expert=2",
            "kimi_k25 4 expert=2",
            "qwen3_vl 2 tensor=2",
            "qwen3_vl 4 tensor=2",
            "qwen3_vl 2 tensor=2 frozen",
            "qwen3_vl 2 tensor=2 recompute",
            "qwen2_5_vl 2 tensor=2",
            "qwen3_vl_moe 2 tensor=2 routes",
            "qwen3_vl_moe 4 tensor=2 expert=2",
            "qwen3_5_moe 2 tensor=2",
            "qwen3_5_moe 4 tensor=2 expert=4",
            "kimi_k25 2 tensor=2",
            "kimi_k25 4 tensor=2 expert=2",
        )
    ],
)
def test_ranks_that_divide_layers_match_one_rank(step: Callable[..., Found], case: str) -> None:
    name, size, *words = case.split()
    alone = step(*KINDS[name], 1, *(word for word in words if "=" not in word))
    divided = step(*KINDS[name], int(size), *words)
    check_equal(alone, divided)
    if "tensor=2" not in words:  # which copies norms of heads
        assert sum(divided.nbytes) == sum(alone.nbytes), "no rank holds a copy of an expert"
    for key, tensor in alone.weights.items():
        torch.testing.assert_close(divided.tensors[key], tensor, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3_vl_moe", ("expert=2", "tensor=2")),
        pytest.param("kimi_k25", ("tensor=2",), marks=pytest.mark.thorough),
        pytest.param("qwen3_vl_moe", ("expert=4",), marks=pytest.mark.thorough),
    ],
)
def test_checkpoint_fits_every_layout(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    """A checkpoint of one rank is restored on four, and theirs on one rank, bit by bit."""
    family, options = KINDS[name]
    write_tiny(family, tmp_path / "tiny", seed=0, **options)
    read = {}
    for layout, size, case in (
        ("alone", 1, ["saved"]),
        ("divided", 4, [*words, f"from={tmp_path / 'alone'}"]),
        ("again", 1, [f"from={tmp_path / 'divided'}"]),
    ):
        (tmp_path / layout).mkdir()
        run_ranks(tmp_path / "tiny", size, tmp_path / layout, *case)
        files = sorted((tmp_path / layout).glob("saved*.safetensors"))
        assert len(files) == size
        shards = ShardReader(files)
        keys = [f"{kind}/{key}" for kind in (MODEL, OPTIMIZER) for key in shards.names(kind)]
        read[layout] = {key: shards.full(key) for key in keys}
    assert any("exp_avg" in key and ".experts." in key for key in read["alone"])
    assert any("exp_avg" in key and "o_proj" in key for key in read["alone"])
    for layout in ("divided", "again"):
        assert read[layout].keys() == read["alone"].keys()
        size = {"divided": 4, "again": 1}[layout]
        case = f"{name} {' '.join(words)} restored {layout}"
        record(case, size, weights=find_error(read[layout], read["alone"]))
        for key, tensor in read["alone"].items():
            assert torch.equal(read[layout][key], tensor), (layout, key)
