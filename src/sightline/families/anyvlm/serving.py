"""What vLLM is told of a checkpoint: to run transformers' own class of the model.

vLLM puts its kernels, its cache and its sampler around the class that the trainer computes with, so
that one way serves every type: the tower is called by `get_image_features`, with the arrays of the
checkpoint's processor under their own names. vLLM is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sightline.errors import FamilyError
from sightline.families.anyvlm.load import load_findings
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.protocol import EngineField, ParameterSlice
from sightline.wire import MediaItem

LIMIT_MM_PER_PROMPT = {"image": 1, "video": 0}
CPU_ARGUMENTS = ("--block-size", "32")
HF_OVERRIDES: dict[str, Any] = {}
MAPS_CHECKPOINT = True


def arguments(family: AnyVLMFamily) -> list[str]:
    words = ["--model-impl", "transformers"]
    if family.findings.rule == "fixed":
        # Processors that count the tokens of an image for vLLM's start ask for a crop, also where
        # images are resized to one size and not cropped.
        height, width = family.findings.arrays[0].shape[-2:]
        size = {"crop_size": {"height": height, "width": width}}
        words += ["--mm-processor-kwargs", json.dumps(size)]
    return words


def vision_prefixes(family: AnyVLMFamily) -> tuple[str, ...]:
    return tuple(family.findings.tower)


def check_servable(folder: Path, takes_updates: bool) -> None:
    """Refuses what vLLM computes otherwise: attention that is not ours to change, arrays that it
    cannot lay side by side, and logits that classes with a tower leave as they are."""
    findings = load_findings(folder)
    if findings.rows_reason:
        raise FamilyError(
            f"{folder}: vLLM attends by its own kernels, and {findings.rows_reason}",
            'set engine = "torch"',
        )
    if findings.rule == "lines" or any(array.fill is not None for array in findings.arrays):
        raise FamilyError(
            f"{folder}: its processor makes arrays of changing shape, which vLLM would have to lay "
            "side by side as transformers does",
            'set engine = "torch"',
        )
    if names := findings.logit_settings:
        raise FamilyError(
            f"{folder}: vLLM applies {' and '.join(names)} of the text model to logits, and "
            "transformers' class of the whole model, which the trainer computes with, does not",
            'set engine = "torch"',
        )


def check_cpu(family: AnyVLMFamily, dtype: str) -> None:
    if names := family.findings.torch_attention:
        raise FamilyError(
            f"{family.path}: {names[0]} is attention of torch itself, which reads matrices that "
            "vLLM packs away on a CPU",
            'serve it on a GPU, or set [inference] engine = "torch"',
        )


def map_parameters(
    family: AnyVLMFamily, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[ParameterSlice]]:
    """transformers' layout. vLLM renames what older checkpoints hold, by transformers' own rules;
    one of them takes a tower `model.visual` for a part of the text model, and not a `visual`."""
    tower = vision_prefixes(family)
    return {
        name.removeprefix("model.") if name.startswith(tower) else name: [ParameterSlice(name)]
        for name in shapes
    }


def build_fields(
    family: AnyVLMFamily, item: MediaItem, patches: np.ndarray, normalizes: bool
) -> dict[str, EngineField]:
    """The arrays of the processor, the grid, and how many features they become."""
    found, fields = family.findings, {}
    for spec, own in found.cut_row():
        if spec.is_ones:
            array = np.ones((len(patches), *spec.shape), spec.dtype)
        else:
            rows = np.ascontiguousarray(patches[:, own]).view(spec.dtype)
            array = rows.reshape(len(patches), *spec.shape)
        array = array[None] if spec.has_batch else array
        fields[spec.name] = EngineField(array, is_flat=True, axis=int(spec.has_batch))
    if name := found.grid_array:
        grid = np.array(item.grid, dtype=np.int64)
        fields[name] = EngineField(grid, is_flat=False, stays_on_host=True)
    num_features = np.array(len(family.feature_offsets(item)))
    fields["num_image_patches"] = EngineField(num_features, is_flat=False, stays_on_host=True)
    return fields
