"""The architectures of the checkpoints with random weights, as keywords of configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from sightline.errors import FamilyError
from sightline.families.tiny_checkpoint import MAX_TOKENS

TEMPLATES = {
    "qwen3_vl": "qwen3_vl.jinja",
    "qwen3_vl_thinking": "reasoning.jinja",
    "qwen3_vl_moe": "qwen3_vl.jinja",
    "qwen2_5_vl": "qwen2_5_vl.jinja",
    "qwen3_5": "qwen3_5.jinja",
    "qwen3": "reasoning.jinja",
}
"""The kinds of checkpoint that can be made, and the template of each."""


@dataclass(frozen=True)
class TinySettings:
    """The numbers of the architecture. head_dim is 32: vLLM's CPU kernels know no smaller."""

    type: str = "qwen3_vl"
    """Model type; `qwen3_vl_thinking` is a qwen3_vl with the chat format that thinks."""
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    experts: int = 4
    """Experts of each layer, where the type has any; two of them answer for a token."""
    rope_theta: float = 10_000.0
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 2
    vision_intermediate: int = 128
    vision_positions: int = 64
    """Position embeddings: a square grid, which is stretched to an image's own."""
    deepstack: tuple[int, ...] = (0,)
    """Vision layers whose features also enter the text layers, in their order."""
    patch: int = 0
    """Pixels along a side of a patch; 0 is what the published models of the type have."""
    merge: int = 2
    temporal: int = 2
    initializer_std: float = 0.05
    min_pixels: int = 1024
    """The default is one visual token: a 32x32 image keeps its size."""
    max_pixels: int = 4096 * 1024
    vocab: int = 0
    """Rows of the embedding; 0 is one for each token of the tokenizer."""
    tied: bool = False
    """Whether the embedding is also the head."""
    dtype: str = "float32"

    @property
    def model_type(self) -> str:
        return self.type.removesuffix("_thinking")

    @property
    def shows_images(self) -> bool:
        return self.type != "qwen3"

    @property
    def patch_size(self) -> int:
        return self.patch or (14 if self.type == "qwen2_5_vl" else 16)

    def check(self) -> None:
        if self.type not in TEMPLATES:
            raise FamilyError(f"no type {self.type!r}", f"use one of {', '.join(TEMPLATES)}")
        if max(self.deepstack, default=-1) >= self.vision_layers:
            raise FamilyError(
                f"deepstack {self.deepstack} of {self.vision_layers} vision layers",
                "name layers from 0 on that the vision tower has",
            )
        if len(self.deepstack) > self.layers:
            raise FamilyError(
                f"{len(self.deepstack)} deepstack layers for {self.layers} text layers",
                "name at most one vision layer for each text layer",
            )


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    # What the published Qwen3-VL of 2 billion parameters has, for benchmarks.
    "2b": {
        "type": "qwen3_vl", "hidden": 2048, "layers": 28, "heads": 16, "kv_heads": 8,
        "head_dim": 128, "intermediate": 6144, "rope_theta": 5_000_000.0, "vision_hidden": 1024,
        "vision_layers": 24, "vision_heads": 16, "vision_intermediate": 4096,
        "vision_positions": 2304, "deepstack": (5, 11, 17), "initializer_std": 0.02,
        "vocab": 151_936, "tied": True, "dtype": "bfloat16",
    },
}  # fmt: skip


def build_config_kwargs(settings: TinySettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """What `AutoConfig.for_model` takes for the type."""
    text = _build_text_config(settings, tokenizer)
    if not settings.shows_images:
        return {**text, "architectures": ["Qwen3ForCausalLM"]}
    return {
        "text_config": text,
        "vision_config": _build_vision_config(settings),
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": settings.tied,
        "dtype": settings.dtype,
    }


def _build_text_config(settings: TinySettings, tokenizer: Tokenizer) -> dict[str, Any]:
    text: dict[str, Any] = {
        "vocab_size": settings.vocab or tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": settings.initializer_std,
        "rope_parameters": _build_rope_config(settings),
        "tie_word_embeddings": settings.tied,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "dtype": settings.dtype,
    }
    if settings.type == "qwen2_5_vl":
        # Its head size is the hidden size over the heads, and has no field.
        del text["head_dim"]
        text["bos_token_id"] = None
    if settings.type == "qwen3_vl_moe":
        text |= {
            "num_experts": settings.experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            # Not the hidden size, nor half of it: files hold experts transposed, and who reads one
            # knows it by the shapes.
            "moe_intermediate_size": settings.intermediate * 3 // 4,
        }
    if settings.type == "qwen3_5":
        kinds = ["linear_attention", "full_attention"]
        text |= {
            "layer_types": [kinds[i % 2] for i in range(settings.layers)],
            "linear_key_head_dim": settings.head_dim,
            "linear_value_head_dim": settings.head_dim,
            "linear_num_key_heads": settings.heads,
            "linear_num_value_heads": settings.heads,
        }
    return text


def _build_rope_config(settings: TinySettings) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.rope_theta}
    if not settings.shows_images:
        return rope
    half = settings.head_dim // 2
    if settings.type == "qwen3_5":
        half //= 2
        rope["partial_rotary_factor"] = 0.5
    third = half // 3
    # Frequencies of time, height and width; they add up to half of what is rotated of a head.
    rope["mrope_section"] = [half - 2 * third, third, third]
    if settings.type != "qwen2_5_vl":
        rope["mrope_interleaved"] = True
    return rope


def _build_vision_config(settings: TinySettings) -> dict[str, Any]:
    vision: dict[str, Any] = {
        "hidden_size": settings.vision_hidden,
        "depth": settings.vision_layers,
        "num_heads": settings.vision_heads,
        "intermediate_size": settings.vision_intermediate,
        "out_hidden_size": settings.hidden,
        "patch_size": settings.patch_size,
        "spatial_merge_size": settings.merge,
        "temporal_patch_size": settings.temporal,
        "initializer_range": settings.initializer_std,
        "dtype": settings.dtype,
    }
    if settings.type == "qwen2_5_vl":
        # A window of two visual tokens by two, and one layer that sees past it.
        side = 2 * settings.merge * settings.patch_size
        return vision | {"window_size": side, "fullatt_block_indexes": [settings.vision_layers - 1]}
    vision["num_position_embeddings"] = settings.vision_positions
    if settings.model_type in ("qwen3_vl", "qwen3_vl_moe"):
        vision["deepstack_visual_indexes"] = list(settings.deepstack)
    return vision


def build_image_processor_config(settings: TinySettings) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": _get_processor_class(settings),
        **_build_pixel_config(settings),
        "size": {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
    }


def build_video_processor_config(settings: TinySettings) -> dict[str, Any]:
    qwen2 = settings.type == "qwen2_5_vl"
    return {
        "video_processor_type": "Qwen2VLVideoProcessor" if qwen2 else "Qwen3VLVideoProcessor",
        "processor_class": _get_processor_class(settings),
        **_build_pixel_config(settings),
        "size": {"shortest_edge": 4 * settings.min_pixels, "longest_edge": settings.max_pixels},
    }


def _get_processor_class(settings: TinySettings) -> str:
    return "Qwen2_5_VLProcessor" if settings.type == "qwen2_5_vl" else "Qwen3VLProcessor"


def _build_pixel_config(settings: TinySettings) -> dict[str, Any]:
    return {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": settings.patch_size,
        "merge_size": settings.merge,
        "temporal_patch_size": settings.temporal,
    }
