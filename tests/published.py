"""Folders with the config.json of published shapes, without weights, to plan their memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sightline.families.registry import write_tiny

SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
TOWERS = {24: (SMALL_TOWER, [5, 11, 17]), 27: (LARGE_TOWER, [8, 16, 24])}
SHAPES: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "2b": (2048, 28, 16, 8, 6144, True, 24),
    "4b": (2560, 36, 32, 8, 9728, True, 24),
    "8b": (4096, 36, 32, 8, 12288, False, 27),
    "30b-a3b": (2048, 48, 32, 4, 6144, False, 27),
}
"""Hidden size, layers, heads, heads of keys, MLP width, tied embeddings, layers of the tower."""
VOCAB = 151_936


def write_shape(name: str, path: Path, **changes: Any) -> Path:
    """Write a folder of this shape. `changes` override the text model's configuration."""
    hidden, layers, heads, kv_heads, mlp, tied, depth = SHAPES[name]
    kind = "qwen3_vl_moe" if "a3b" in name else "qwen3_vl"
    write_tiny("qwen_vl", path, seed=0, type=kind)
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "intermediate_size": mlp,
        "vocab_size": VOCAB, "tie_word_embeddings": tied,
    }  # fmt: skip
    if kind.endswith("moe"):
        config["text_config"] |= {
            "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        }  # fmt: skip
    config["text_config"] |= changes
    config["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    config["tie_word_embeddings"] = tied
    tower, deepstack = TOWERS[depth]
    config["vision_config"] |= {
        **tower, "num_heads": 16, "out_hidden_size": hidden, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": deepstack,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    return path
