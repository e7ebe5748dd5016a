"""Serve a generic checkpoint with vLLM and the model's transformers class.

vLLM uses the trainer's model class with its own kernels, cache and sampler. This works for nearly
every model type. vLLM calls the tower through `get_image_features`, and passes the processor's
arrays under their own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sightline.errors import FamilyError, MediaRefused
from sightline.families.anyvlm import load_findings
from sightline.families.anyvlm.findings import Findings
from sightline.families.anyvlm.vision import AnyVLMFamily, join_patches
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import EngineField, ParameterSlice, ServingSpec
from sightline.wire import MediaItem

TORCH = 'set [inference] engine = "torch"'
OWN_CLASSES = {"SmolVLMForConditionalGeneration": "llama"}
"""Models that use vLLM's own class, with the text model type of that class. With transformers'
class, vLLM needs a processor that counts image tokens, which SmolVLM's processor does not
support."""


def _find_refusal(findings: Findings, text: str | None) -> str:
    """Return why vLLM computes a model differently, or "". `text` is its text model type."""
    name, own = findings.model_class, OWN_CLASSES.get(findings.model_class)
    if findings.rows_reason:
        return f"{findings.rows_reason}; vLLM uses its own attention kernels"
    if any(array.fill is not None for array in findings.arrays):
        return "it cannot batch images whose arrays change shape with the image size"
    if findings.shows_media and not findings.counts_tokens and own is None:
        return f"it asks the processor for the number of image tokens, and {name}'s cannot count"
    if own is not None and text not in (None, own):
        return f"its {name} needs a text model of type {own!r}, and this one is {text!r}"
    if names := findings.logit_settings:
        return f"it applies {' and '.join(names)} to logits, and the trainer's model class does not"
    return ""


class Serving(ServingSpec):
    MAPS_CHECKPOINT = True

    def arguments(self, family: AnyVLMFamily) -> list[str]:
        is_own = family.findings.model_class in OWN_CLASSES
        options = ["--model-impl", "vllm" if is_own else "transformers"]
        if family.findings.rule == "fixed":
            # At startup, vLLM makes the processor count image tokens. This requires a crop size,
            # even for processors that do not crop images.
            height, width = family.findings.arrays[0].shape[-2:]
            size = {"crop_size": {"height": height, "width": width}}
            options += ["--mm-processor-kwargs", json.dumps(size)]
        return options

    def vision_prefixes(self, family: AnyVLMFamily) -> tuple[str, ...]:
        return tuple(family.findings.tower)

    def check_servable(self, folder: Path, takes_updates: bool) -> None:
        text = read_json(folder / "config.json").get("text_config", {}).get("model_type")
        if reason := _find_refusal(load_findings(folder), text):
            raise FamilyError(f"{folder}: vLLM cannot serve it: {reason}", TORCH)

    def check_cpu(self, family: AnyVLMFamily, dtype: str) -> None:
        if names := family.findings.torch_attention:
            raise FamilyError(
                f"{family.path}: vLLM cannot serve it on a CPU, because {names[0]} is torch's own "
                "attention, whose weights vLLM repacks",
                'serve it on a GPU, or set [inference] engine = "torch"',
            )

    def map_parameters(
        self, family: AnyVLMFamily, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, list[ParameterSlice]]:
        """Map transformers' parameters, with tower names that vLLM's renaming handles correctly.

        vLLM applies transformers' renaming rules for older checkpoints. One of them treats
        `model.visual` as a part of the text model, but not `visual`.
        """
        tower = self.vision_prefixes(family)
        if family.findings.model_class in OWN_CLASSES:
            return {name: [ParameterSlice(name)] for name in shapes}
        return {
            name.removeprefix("model.") if name.startswith(tower) else name: [ParameterSlice(name)]
            for name in shapes
        }

    def build_fields(
        self, family: AnyVLMFamily, item: MediaItem, patches: np.ndarray, normalizes: bool
    ) -> dict[str, EngineField]:
        findings, fields = family.findings, {}
        if findings.rule == "lines" and len(patches) == findings.merge**2:
            raise MediaRefused(
                f"an image of {item.ref.width}x{item.ref.height} takes a single token, for which "
                "transformers' class returns the wrong shape in vLLM",
                f"enlarge the image, or {TORCH}",
            )
        is_own = findings.model_class in OWN_CLASSES
        for spec, columns in findings.cut_row():
            if spec.is_ones:
                array = np.ones((len(patches), *spec.shape), spec.dtype)
            else:
                rows = np.ascontiguousarray(patches[:, columns]).view(spec.dtype)
                array = rows.reshape(len(patches), *spec.shape)
            if findings.rule == "lines":
                fields[spec.name] = EngineField(join_patches(array, item.grid), is_flat=False)
                continue
            has_batch = spec.has_batch and not is_own
            array = array[None] if has_batch else array
            fields[spec.name] = EngineField(array, is_flat=True, axis=int(has_batch))
        if name := findings.grid_array:
            grid = np.array(item.grid, dtype=np.int64)
            if findings.rule == "lines":
                grid = grid[1:] * findings.rule_settings["patch"]
            fields[name] = EngineField(grid, is_flat=False, stays_on_host=True)
        if is_own:
            num_tiles = EngineField(np.array([len(patches)]), is_flat=True, stays_on_host=True)
            return fields | {"num_patches": num_tiles}
        num_features = np.array(len(family.feature_offsets(item)))
        fields["num_image_patches"] = EngineField(num_features, is_flat=False, stays_on_host=True)
        return fields
