"""Ranks that divide experts give the results of one rank, and checkpoints fit every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_equal import Found, check_equal, run_ranks, step  # noqa: F401

from sightline.families.registry import write_tiny
from sightline.trainer.snapshot import MODEL, OPTIMIZER, ShardReader

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
QWEN3_VL_MOE = ("qwen_vl", {"type": "qwen3_vl_moe"})
QWEN3_5_MOE = ("qwen_vl", {"type": "qwen3_5_moe"})
KIMI = ("kimi_k25", {"type": "kimi_k25"})


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        # Two groups: FSDP shards each rank's experts.
        (QWEN3_VL_MOE, 4, ("expert=2",)),
        (QWEN3_VL_MOE, 2, ("expert=2", "routes")),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (QWEN3_VL_MOE, 2, ("expert=2",)),
                (QWEN3_VL_MOE, 4, ("expert=4",)),
                (QWEN3_VL_MOE, 4, ("expert=4", "one")),  # ranks without a micro-batch
                (QWEN3_VL_MOE, 4, ("expert=2", "context=2")),
                (QWEN3_VL_MOE, 2, ("expert=2", "recompute")),
                (QWEN3_5_MOE, 2, ("expert=2",)),
                (QWEN3_5_MOE, 4, ("expert=2",)),
                (KIMI, 2, ("expert=2",)),
                (KIMI, 4, ("expert=2",)),
            )
        ),
    ],
)
def test_ranks_that_divide_experts_match_one_rank(
    step: Callable[..., Found],  # noqa: F811
    kind: tuple[str, dict[str, str]],
    size: int,
    words: tuple[str, ...],
) -> None:
    alone = step(*kind, 1, *(word for word in words if "=" not in word))
    divided = step(*kind, size, *words)
    check_equal(alone, divided)
    assert any(".experts." in name for name in alone.gradients)
    assert sum(divided.nbytes) == sum(alone.nbytes), "no rank holds a copy of an expert"
    for name, tensor in alone.tensors.items():
        if name.startswith("after."):
            torch.testing.assert_close(divided.tensors[name], tensor, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("kind", "words"), [(QWEN3_VL_MOE, ("expert=2",))], ids=lambda value: str(value)
)
def test_checkpoint_fits_every_layout(
    tmp_path: Path, kind: tuple[str, dict[str, str]], words: tuple[str, ...]
) -> None:
    """A checkpoint of one rank is restored on four, and theirs on one rank, bit by bit."""
    family, options = kind
    write_tiny(family, tmp_path / "tiny", seed=0, **options)
    read = {}
    for name, size, case in (
        ("alone", 1, ["saved"]),
        ("divided", 4, [*words, f"from={tmp_path / 'alone'}"]),
        ("again", 1, [f"from={tmp_path / 'divided'}"]),
    ):
        (tmp_path / name).mkdir()
        run_ranks(tmp_path / "tiny", size, tmp_path / name, *case)
        files = sorted((tmp_path / name).glob("saved*.safetensors"))
        assert len(files) == size
        shards = ShardReader(files)
        keys = [f"{kind}/{key}" for kind in (MODEL, OPTIMIZER) for key in shards.names(kind)]
        read[name] = {key: shards.full(key) for key in keys}
    assert any("exp_avg" in key and ".experts." in key for key in read["alone"])
    for name in ("divided", "again"):
        assert read[name].keys() == read["alone"].keys()
        for key, tensor in read["alone"].items():
            assert torch.equal(read[name][key], tensor), (name, key)
