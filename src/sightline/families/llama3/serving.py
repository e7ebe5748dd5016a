"""What vLLM is told of a checkpoint: nothing but how to run on a CPU. It is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from sightline.errors import FamilyError
from sightline.families.protocol import ParameterSlice

LIMIT_MM_PER_PROMPT: dict[str, int] = {}
CPU_ARGUMENTS = ("--block-size", "32")
HF_OVERRIDES: dict[str, Any] = {}
MAPS_CHECKPOINT = False


def arguments(family: object) -> tuple[str, ...]:
    return ()


def vision_prefixes(family: object) -> tuple[str, ...]:
    return ()


def check_servable(folder: Path, takes_updates: bool) -> None:
    """`llama` is a model type of vLLM's."""


def check_cpu(family: object, dtype: str) -> None:
    """vLLM has kernels for it."""


def map_parameters(
    family: object, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[ParameterSlice]]:
    """vLLM reads transformers' layout."""
    return {name: [ParameterSlice(name)] for name in shapes}


def build_fields(*_: object) -> NoReturn:
    raise FamilyError("the checkpoint has no vision tower", "use a vision-language checkpoint")
