"""Serve Kimi K2.5 with vLLM.

vLLM expects the layout of the published checkpoint. It has one matrix per expert, and one matrix
for the vision tower's queries, keys and values. In the latter, rotated pairs are adjacent, while
transformers separates the two halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import ParameterSlice, ServingSpec

NEEDED = ("in_patch_limit_each_frame", "in_patch_limit_video", "temporal_merge_kernel_size")
"""Keys of `media_proc_cfg` that vLLM reads to build its image processor, although the processor is
not used."""

RENAMES = (
    (r"lm_head\.", "language_model.lm_head."),
    (r"model\.language_model\.", "language_model.model."),
    (r"model\.mm_projector\.in_proj\.", "mm_projector.proj.0."),
    (r"model\.mm_projector\.out_proj\.", "mm_projector.proj.2."),
    (r"model\.mm_projector\.", "mm_projector."),
    (r"model\.vision_tower\.layers\.(\d+)\.norm1\.", r"vision_tower.encoder.blocks.\1.norm0."),
    (r"model\.vision_tower\.layers\.(\d+)\.norm2\.", r"vision_tower.encoder.blocks.\1.norm1."),
    (r"model\.vision_tower\.layers\.(\d+)\.mlp\.fc1\.", r"vision_tower.encoder.blocks.\1.mlp.fc0."),
    (r"model\.vision_tower\.layers\.(\d+)\.mlp\.fc2\.", r"vision_tower.encoder.blocks.\1.mlp.fc1."),
    (r"model\.vision_tower\.layers\.(\d+)\.attn\.proj\.", r"vision_tower.encoder.blocks.\1.wo."),
    (r"model\.vision_tower\.final_layernorm\.", "vision_tower.encoder.final_layernorm."),
    (
        r"model\.vision_tower\.patch_embed\.pos_emb\.position_embeddings$",
        "vision_tower.patch_embed.pos_emb.weight",
    ),
    (r"model\.vision_tower\.", "vision_tower."),
)
"""Patterns of transformers' names, with the published names. The first match applies."""

QUERIES = re.compile(r"model\.vision_tower\.layers\.(\d+)\.attn\.q_proj\.(weight|bias)")
KEYS_VALUES = re.compile(r"model\.vision_tower\.layers\.\d+\.attn\.[kv]_proj\.(weight|bias)")
EXPERTS = re.compile(r"model\.language_model\.(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


class Serving(ServingSpec):
    LIMIT_MM_PER_PROMPT = {"vision_chunk": 1}
    CPU_ARGUMENTS = (
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
        # vLLM 0.32's kernel treats the query heads of latent attention as tokens.
        "--compilation-config",
        '{"custom_ops": ["-rotary_embedding"]}',
    )
    # vLLM's name for the model, and its expert routing, which transformers does not save.
    HF_OVERRIDES = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    }
    MAPS_CHECKPOINT = True
    GRID_NAME = "grid_thws"
    VISION_PREFIXES = ("model.vision_tower.", "model.mm_projector.")

    def check_servable(self, folder: Path, takes_updates: bool) -> None:
        config = read_json(folder / "config.json")
        parts = (config, config["text_config"])
        if takes_updates and any(part.get("quantization_config") for part in parts):
            raise FamilyError(
                "the checkpoint has quantized weights, and vLLM cannot load the trainer's "
                "unquantized ones into them",
                'set [inference] engine = "torch", or train a checkpoint that is not quantized',
            )
        file = folder / "preprocessor_config.json"
        settings = read_json(file).get("media_proc_cfg") or {}
        if missing := [name for name in NEEDED if name not in settings]:
            raise FamilyError(
                f"media_proc_cfg in {file} lacks {', '.join(missing)}, which vLLM needs at startup",
                'copy the file from the published folder, or set [inference] engine = "torch"',
            )

    def map_parameters(
        self, family: object, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, list[ParameterSlice]]:
        """Map every published parameter to slices of our parameters. Published names stay."""
        heads = config["vision_config"]["num_attention_heads"]
        return {
            name: parts
            for source, shape in shapes.items()
            for name, parts in _map_parameter(source, shape, heads)
        }


def _map_parameter(
    source: str, shape: tuple[int, ...], heads: int
) -> Iterator[tuple[str, list[ParameterSlice]]]:
    if match := EXPERTS.fullmatch(source):
        yield from _split_experts(source, shape, f"language_model.model.{match[1]}", match[2])
    elif match := QUERIES.fullmatch(source):
        # transformers' row for each published row, in which rotated pairs are adjacent
        turned = np.arange(shape[0]).reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
        keys, values = (source.replace("q_proj", f"{letter}_proj") for letter in "kv")
        parts = [ParameterSlice(part, rows=turned) for part in (source, keys)]
        name = f"vision_tower.encoder.blocks.{match[1]}.wqkv.{match[2]}"
        yield name, [*parts, ParameterSlice(values)]
    elif not KEYS_VALUES.fullmatch(source):
        yield _rename(source), [ParameterSlice(source)]


def _split_experts(
    source: str, shape: tuple[int, ...], stem: str, kind: str
) -> Iterator[tuple[str, list[ParameterSlice]]]:
    num, rows = shape[:2]
    for i in range(num):
        if kind == "down_proj":
            yield f"{stem}.{i}.down_proj.weight", [ParameterSlice(source, index=i)]
        else:
            gate, up = np.split(np.arange(rows), 2)
            yield f"{stem}.{i}.gate_proj.weight", [ParameterSlice(source, index=i, rows=gate)]
            yield f"{stem}.{i}.up_proj.weight", [ParameterSlice(source, index=i, rows=up)]


def _rename(source: str) -> str:
    for pattern, name in RENAMES:
        if re.match(pattern, source):
            return re.sub(pattern, name, source, count=1)
    return source
