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
CPU_ARGUMENTS = ("--block-size", "32")
HF_OVERRIDES = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "text_config": {"attention_bias": True},
}
"""vLLM's own class of the model, which it knows under the name of the first release, and that
queries, keys and values have biases, which transformers need not be told."""
MAPS_CHECKPOINT = False


def arguments(family: object) -> tuple[str, ...]:
    return ()


def vision_prefixes(family: object) -> tuple[str, ...]:
    return ("model.visual.",)


def check_servable(folder: Path, takes_updates: bool) -> None:
    """A type that could not be tried is refused."""
    if (kind := read_json(folder / "config.json")["model_type"]) == "glm4v_moe":
        raise FamilyError(f"a {kind}, which was not tried with vLLM", 'set engine = "torch"')


def check_cpu(family: object, dtype: str) -> None:
    """vLLM has kernels for it."""


def map_parameters(
    family: object, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[ParameterSlice]]:
    """vLLM reads transformers' layout."""
    return {name: [ParameterSlice(name)] for name in shapes}


build_fields = partial(build_engine_fields, "image_grid_thw")
