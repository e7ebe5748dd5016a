"""A random checkpoint of a large size: equal bytes for equal arguments, whole, not all alike."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from sightline.families.qwen_vl import tiny
from sightline.families.tiny_checkpoint import LARGE_HIDDEN

SMALL = {
    "layers": 1, "vision_layers": 1, "deepstack": [0], "heads": 2, "kv_heads": 1, "head_dim": 32,
    "intermediate": 64, "vision_hidden": 64, "vision_heads": 2, "vision_intermediate": 64,
}  # fmt: skip


def test_weights_drawn_in_threads_are_the_same_every_time(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny.write(tmp_path / name, seed, hidden=LARGE_HIDDEN, **SMALL)
    first, again, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "c")
    )
    assert first == again != other
    weights = load_file(tmp_path / "a" / "model.safetensors")
    matrices = [tensor.float() for tensor in weights.values() if tensor.dim() > 1]
    assert all(0.04 < matrix.std() < 0.06 for matrix in matrices)
    assert all(tensor.unique().numel() == 1 for tensor in weights.values() if tensor.dim() == 1)
    assert (tmp_path / "a" / "model.safetensors").stat().st_mode & 0o777 == 0o644
