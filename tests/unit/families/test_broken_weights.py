"""An error of transformers' code while it loads a native family's weights names the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sightline import FamilyError
from sightline.families import load_family, load_forward
from sightline.families.registry import write_tiny


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "cause"), [(cut_in_half, "SafetensorError"), (Path.unlink, "OSError")]
)
def test_broken_weights_of_a_native_family_are_refused(
    damage: Callable[[Path], None], cause: str, tmp_path: Path
) -> None:
    write_tiny("llama3", tmp_path)
    damage(tmp_path / "model.safetensors")
    family = load_family(tmp_path)
    with pytest.raises(FamilyError, match=f"weights cannot be loaded: .* {cause}: ") as caught:
        load_forward(tmp_path, family, torch.device("cpu"), torch.float32, "sdpa")
    assert "*.safetensors files again" in caught.value.fix
