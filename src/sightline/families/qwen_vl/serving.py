"""How vLLM names what it takes of an image. Plain data: vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import Family, ParameterSlice, build_engine_fields

LIMIT_MM_PER_PROMPT = {"image": 1, "video": 0}
CPU_ARGUMENTS = ("--block-size", "32")
HF_OVERRIDES: dict[str, Any] = {}
MAPS_CHECKPOINT = False


def arguments(family: object) -> tuple[str, ...]:
    return ()


def vision_prefixes(family: object) -> tuple[str, ...]:
    return ("model.visual.",)


def check_servable(folder: Path, takes_updates: bool) -> None:
    """A type that could not be tried is refused."""
    if (kind := read_json(folder / "config.json")["model_type"]) == "qwen3_5_moe":
        raise FamilyError(
            f"a {kind}, which was not tried with vLLM: its kernels for the layers that carry a "
            "state take no float32 on a CPU",
            'set engine = "torch"',
        )


def check_cpu(family: Family, dtype: str) -> None:
    if family.packing.carries_state and dtype != "bfloat16":
        raise FamilyError(
            "vLLM computes layers that carry a state on a CPU in bfloat16 alone, and [model] dtype "
            f"is {dtype!r}",
            'set dtype = "bfloat16", or [inference] engine = "torch"',
        )


def map_parameters(
    family: object, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[ParameterSlice]]:
    """vLLM reads transformers' layout."""
    return {name: [ParameterSlice(name)] for name in shapes}


build_fields = partial(build_engine_fields, "image_grid_thw")
