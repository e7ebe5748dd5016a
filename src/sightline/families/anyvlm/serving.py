"""What vLLM is told of a checkpoint: to run transformers' own class of the model.

vLLM puts its kernels, its cache and its sampler around the class that the trainer computes with, so
that one way serves nearly every type: the tower is called by `get_image_features`, with the arrays
of the checkpoint's processor under their own names. vLLM is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sightline.errors import FamilyError, MediaRefused
from sightline.families.anyvlm.findings import Findings
from sightline.families.anyvlm.load import load_findings
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import EngineField, Grid, ParameterSlice
from sightline.wire import MediaItem

LIMIT_MM_PER_PROMPT = {"image": 1, "video": 0}
CPU_ARGUMENTS = ("--block-size", "32")
HF_OVERRIDES: dict[str, Any] = {}
MAPS_CHECKPOINT = True
OWN_CLASSES = {"SmolVLMForConditionalGeneration": "llama"}
"""Models that a class of vLLM's own computes, and the text model that it has. Around transformers'
class vLLM asks the processor to count the tokens of an image, and theirs does not count."""


def arguments(family: AnyVLMFamily) -> list[str]:
    is_own = family.findings.model_class in OWN_CLASSES
    words = ["--model-impl", "vllm" if is_own else "transformers"]
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
            f"{folder}: padded rows: {_explain_rows(findings)}", 'set engine = "torch"'
        )
    if any(array.fill is not None for array in findings.arrays):
        raise FamilyError(
            f"{folder}: its processor makes arrays of changing shape, which vLLM would have to lay "
            "side by side as transformers does",
            'set engine = "torch"',
        )
    if not findings.counts_tokens and findings.model_class not in OWN_CLASSES:
        raise FamilyError(
            f"{folder}: when it starts, vLLM asks transformers' processor for the tokens of the "
            f"largest image, and that of {findings.model_class} does not count them",
            'set engine = "torch"',
        )
    text = read_json(folder / "config.json").get("text_config", {}).get("model_type")
    if text not in (None, own := OWN_CLASSES.get(findings.model_class, text)):
        raise FamilyError(
            f"{folder}: vLLM's class of {findings.model_class} has a text model {own}, and this "
            f"one is {text}",
            'set engine = "torch"',
        )
    if names := findings.logit_settings:
        raise FamilyError(
            f"{folder}: vLLM applies {' and '.join(names)} of the text model to logits, and "
            "transformers' class of the whole model, which the trainer computes with, does not",
            'set engine = "torch"',
        )


LAYER_REASONS = {
    "chunked_attention": "vLLM computes chunks of transformers' class as full attention",
    "conv": "vLLM serves transformers' class by its attention, and these layers are none",
    "sliding_attention": "windows were not tried with vLLM",
}
"""Why vLLM does not serve layers of a kind."""


def _explain_rows(findings: Findings) -> str:
    """Why vLLM does not compute what the trainer does, where that is more than to attend to what
    is before."""
    if findings.sees_ahead:
        return (
            "each token of an image sees the others, and vLLM computes it causally on a CPU; on a "
            "GPU it was not tried"
        )
    reasons = (LAYER_REASONS[kind] for kind in findings.layer_kinds if kind in LAYER_REASONS)
    reason = next(reasons, "vLLM attends by its own kernels")
    return f"{findings.rows_reason}; {reason}"


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
    if family.findings.model_class in OWN_CLASSES:
        return {name: [ParameterSlice(name)] for name in shapes}
    return {
        name.removeprefix("model.") if name.startswith(tower) else name: [ParameterSlice(name)]
        for name in shapes
    }


def build_fields(
    family: AnyVLMFamily, item: MediaItem, patches: np.ndarray, normalizes: bool
) -> dict[str, EngineField]:
    """The arrays of the processor, the grid, and how many features they become."""
    found, fields = family.findings, {}
    if found.rule == "lines" and len(patches) == found.merge**2:
        raise MediaRefused(
            f"an image of {item.ref.width}x{item.ref.height}, one token: transformers' class, in "
            "which vLLM computes it, squeezes the axis of a lone token away",
            'show it larger, or set engine = "torch"',
        )
    is_own = found.model_class in OWN_CLASSES
    for spec, own in found.cut_row():
        if spec.is_ones:
            array = np.ones((len(patches), *spec.shape), spec.dtype)
        else:
            rows = np.ascontiguousarray(patches[:, own]).view(spec.dtype)
            array = rows.reshape(len(patches), *spec.shape)
        if found.rule == "lines":
            fields[spec.name] = EngineField(_join_patches(array, item.grid), is_flat=False)
            continue
        has_batch = spec.has_batch and not is_own
        array = array[None] if has_batch else array
        fields[spec.name] = EngineField(array, is_flat=True, axis=int(has_batch))
    if name := found.grid_array:
        grid = np.array(item.grid, dtype=np.int64)
        if found.rule == "lines":
            grid = grid[1:] * found.rule_settings["patch"]
        fields[name] = EngineField(grid, is_flat=False, stays_on_host=True)
    if is_own:
        num_tiles = np.array([len(patches)])
        return fields | {"num_patches": EngineField(num_tiles, is_flat=True, stays_on_host=True)}
    num_features = np.array(len(family.feature_offsets(item)))
    fields["num_image_patches"] = EngineField(num_features, is_flat=False, stays_on_host=True)
    return fields


def _join_patches(patches: np.ndarray, grid: Grid) -> np.ndarray:
    """(channels, height, width) of an image whose patches came line by line."""
    _, rows, columns = grid
    channels, size, _ = patches.shape[1:]
    lines = patches.reshape(rows, columns, channels, size, size).transpose(2, 0, 3, 1, 4)
    return lines.reshape(channels, rows * size, columns * size)
