"""How vLLM names what it takes of an image. Plain data: vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import ParameterSlice, build_engine_fields

LIMIT_MM_PER_PROMPT = {"image": 1, "video": 0}
VISION_PREFIXES = ("model.visual.",)
CPU_ARGUMENTS = ("--block-size", "32")
HF_OVERRIDES: dict[str, Any] = {}


def check_servable(folder: Path, takes_updates: bool) -> None:
    """Every model type of the family that shows images is one of vLLM's."""
    if "vision_config" not in read_json(folder / "config.json"):
        raise FamilyError(
            "a checkpoint without a vision tower, which was not tried with vLLM",
            'set engine = "torch"',
        )


def map_parameters(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[ParameterSlice]]:
    """vLLM reads transformers' layout."""
    return {name: [ParameterSlice(name)] for name in shapes}


build_fields = partial(build_engine_fields, "image_grid_thw")
