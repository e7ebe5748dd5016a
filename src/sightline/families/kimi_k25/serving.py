"""How vLLM names what it takes of an image. Plain data: vLLM is not imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.kimi_k25.published_layout import map_published_parameters
from sightline.families.kimi_k25.vision import KimiK25Family
from sightline.families.protocol import EngineField
from sightline.wire import MediaItem

LIMIT_MM_PER_PROMPT = {"vision_chunk": 1}
VISION_PREFIXES = ("model.vision_tower.", "model.mm_projector.")
CPU_ARGUMENTS = (
    "--no-enable-prefix-caching",
    "--no-enable-chunked-prefill",
    # The kernel of vLLM 0.32 takes the heads of latent attention's queries for tokens.
    "--compilation-config",
    '{"custom_ops": ["-rotary_embedding"]}',
)

HF_OVERRIDES = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""vLLM's name of the model, and how it chooses experts, which transformers does not write down."""


NEEDED = ("in_patch_limit_each_frame", "in_patch_limit_video", "temporal_merge_kernel_size")
"""Keys of `media_proc_cfg` that vLLM reads: its image processor is built, though nothing goes
through it."""


def check_servable(folder: Path, takes_updates: bool) -> None:
    config = read_json(folder / "config.json")
    parts = (config, config["text_config"])
    if takes_updates and any(part.get("quantization_config") for part in parts):
        raise FamilyError(
            "a checkpoint with quantized weights: vLLM keeps them so, and the trainer publishes "
            "others",
            'set engine = "torch", or train a checkpoint that is not quantized',
        )
    file = folder / "preprocessor_config.json"
    settings = read_json(file).get("media_proc_cfg") or {}
    if missing := [name for name in NEEDED if name not in settings]:
        raise FamilyError(
            f"{file} has no {', '.join(missing)} in media_proc_cfg, and vLLM reads them at its "
            "start",
            'copy the file of the published folder, or set engine = "torch"',
        )


map_parameters = map_published_parameters


def build_fields(
    family: KimiK25Family, item: MediaItem, patches: np.ndarray, normalizes: bool
) -> dict[str, EngineField]:
    values = patches.reshape(len(patches), 3, -1)
    rows = family.shape_rows(values) if normalizes else family.rows(patches)
    grid = np.array(item.grid, dtype=np.int64)
    return {
        "pixel_values": EngineField(rows, is_flat=True),
        "grid_thws": EngineField(grid, is_flat=False, stays_on_host=True),
    }
