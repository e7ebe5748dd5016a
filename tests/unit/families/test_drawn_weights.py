"""Random weights of large checkpoints."""

from __future__ import annotations

import errno
import re
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sightline.families.registry import write_tiny
from sightline.families.tiny_checkpoint import DRAWN_AT_ONCE, LARGE_HIDDEN, draw_weights


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4096, DRAWN_AT_ONCE // 4096 + 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.other = nn.Embedding(30, 40)


def test_tensors_are_drawn_by_name_and_seed_and_large_ones_in_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.device("meta"):
        model = Layers()

    def draw(seed: int, name: str) -> dict[str, torch.Tensor]:
        draw_weights(tmp_path / name, dict(model.named_parameters()), seed, std=0.02)
        return load_file(tmp_path / name)

    drawn = draw(1, "first")
    assert re.fullmatch(
        r"weights: 0\.01 GB drawn and written in \d+\.\d s\n", capsys.readouterr().err
    )
    assert {name: (x.shape, x.dtype) for name, x in drawn.items()} == {
        name: (x.shape, x.dtype) for name, x in model.named_parameters()
    }
    wide = drawn["wide.weight"].view(-1)
    for part in (wide[:DRAWN_AT_ONCE], wide[DRAWN_AT_ONCE:], drawn["other.weight"]):
        assert abs(float(part.float().mean())) < 0.02 / len(part.view(-1)) ** 0.5 * 5
        assert abs(float(part.float().std()) / 0.02 - 1) < 0.1
    rest = wide[DRAWN_AT_ONCE:]
    assert not torch.equal(rest, wide[: len(rest)])
    assert torch.equal(drawn["norm.weight"], torch.ones(8))
    assert not drawn["norm.bias"].any() and not drawn["wide.bias"].any()
    again, other = draw(1, "again"), draw(2, "other")
    assert torch.equal(again["wide.weight"], drawn["wide.weight"])
    assert not torch.equal(other["other.weight"], drawn["other.weight"])


def test_failed_disk_write_is_an_error(tmp_path: Path) -> None:
    shapes = {"wide.weight": torch.empty(300, 400, device="meta")}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as found:
            draw_weights(tmp_path / "weights", shapes, seed=0, std=0.02)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.value.errno == errno.EFBIG


SMALL = {
    "layers": 1, "vision_layers": 1, "deepstack": [0], "heads": 2, "kv_heads": 1, "head_dim": 32,
    "intermediate": 64, "vision_hidden": 64, "vision_heads": 2, "vision_intermediate": 64,
}  # fmt: skip


def test_weights_drawn_in_threads_are_deterministic(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny("qwen_vl", tmp_path / name, seed, hidden=LARGE_HIDDEN, **SMALL)
    first, again, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "c")
    )
    assert first == again != other
    weights = load_file(tmp_path / "a" / "model.safetensors")
    matrices = [tensor.float() for tensor in weights.values() if tensor.dim() > 1]
    assert all(0.04 < matrix.std() < 0.06 for matrix in matrices)
    assert all(tensor.unique().numel() == 1 for tensor in weights.values() if tensor.dim() == 1)
    assert (tmp_path / "a" / "model.safetensors").stat().st_mode & 0o777 == 0o644
