"""Random weights of large checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from sightline.families.registry import write_tiny
from sightline.families.tiny_checkpoint import LARGE_HIDDEN, draw_weights


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, 256, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.other = nn.Embedding(30, 40)


def test_tensors_are_drawn_by_name_and_seed() -> None:
    with torch.device("meta"):
        shapes = dict(Layers().named_parameters())
    drawn = draw_weights(shapes, seed=1, std=0.02)
    assert {name: (x.shape, x.dtype) for name, x in drawn.items()} == {
        name: (x.shape, x.dtype) for name, x in shapes.items()
    }
    for part in (drawn["wide.weight"], drawn["other.weight"]):
        assert abs(float(part.float().mean())) < 0.02 / len(part.view(-1)) ** 0.5 * 5
        assert abs(float(part.float().std()) / 0.02 - 1) < 0.1
    assert torch.equal(drawn["norm.weight"], torch.ones(8))
    assert not drawn["norm.bias"].any() and not drawn["wide.bias"].any()
    again, other = (draw_weights(shapes, seed, std=0.02) for seed in (1, 2))
    assert torch.equal(again["wide.weight"], drawn["wide.weight"])
    assert not torch.equal(other["other.weight"], drawn["other.weight"])


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
