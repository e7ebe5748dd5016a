"""Small checkpoints of types that models are published as: their classes, processors and formats.

Templates are those of the releases, told again: what they write, in fewer words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HIDDEN, HEADS, LAYERS = 64, 2, 2
SIDE, PATCH = 16, 4
"""Pixels along a side of a tile, and of a patch of the vision tower."""
COLORS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}

Config = dict[str, Any]


@dataclass(frozen=True)
class TinyType:
    special: tuple[str, ...]
    """Special tokens, the one that pads a batch first."""
    pad: str
    """Holds a feature of an image."""
    end: str
    """Ends a turn."""
    named: dict[str, str]
    """What the tokenizer calls some of them."""
    build_config: Callable[[Config, Config, dict[str, int]], Config]
    """Of the settings that text models have in common, those of towers, and the ids of tokens."""
    images: Config
    """The image processor."""
    processor: Config
    template: str = ""
    """Of another type; empty for one of its own."""
    needs_torchvision: bool = False
    """Whether transformers has its image processor for torchvision alone."""


def _build_gemma3(text: Config, vision: Config, ids: dict[str, int]) -> Config:
    # A window that prompts are longer than.
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    heads = {"head_dim": HIDDEN // HEADS, "query_pre_attn_scalar": HIDDEN // HEADS}
    return {
        "text_config": {"model_type": "gemma3_text", **text, **window, **heads},
        "vision_config": {"model_type": "siglip_vision_model", **vision, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": ids["<image_soft_token>"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "tie_word_embeddings": True,
    }


def _build_gemma4(text: Config, vision: Config, ids: dict[str, int]) -> Config:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    heads = {"head_dim": HIDDEN // HEADS, "global_head_dim": HIDDEN // HEADS}
    layers = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(ids)}
    more = {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"}
    tower = {"pooling_kernel_size": 2, "position_embedding_size": 280, "head_dim": HIDDEN // HEADS}
    return {
        "text_config": {**text, **kinds, **heads, **layers, **more, "pad_token_id": ids["<pad>"]},
        "vision_config": {**vision, **tower, "num_key_value_heads": HEADS},
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
        "tie_word_embeddings": True,
    }


def _build_mistral3(text: Config, vision: Config, ids: dict[str, int]) -> Config:
    heads = {"head_dim": HIDDEN // HEADS}
    return {
        "text_config": {"model_type": "mistral", **text, **heads, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **vision, **heads, "image_size": 4 * SIDE},
        "spatial_merge_size": 2,
        "image_token_index": ids["[IMG]"],
        "tie_word_embeddings": False,
    }


def _build_smolvlm(text: Config, vision: Config, ids: dict[str, int]) -> Config:
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": vision,
        "scale_factor": 2,
        "pad_token_id": ids["<|endoftext|>"],
        "image_token_id": ids["<image>"],
        "tie_word_embeddings": False,
    }


def _build_lfm2_vl(text: Config, vision: Config, ids: dict[str, int]) -> Config:
    # A convolution along the tokens, and attention.
    kinds = {"layer_types": ["conv", "full_attention"], "pad_token_id": ids["<|pad|>"]}
    patches = {"num_patches": 16, "vision_use_head": False}
    return {
        "text_config": {"model_type": "lfm2", **text, **kinds, "tie_word_embeddings": True},
        "vision_config": {"model_type": "siglip2_vision_model", **vision, **patches},
        "image_token_id": ids["<image>"],
        "downsample_factor": 2,
        "projector_hidden_size": HIDDEN,
        "tie_word_embeddings": True,
    }


def _build_llama4(text: Config, vision: Config, ids: dict[str, int]) -> Config:
    # Chunks that prompts are longer than; in the second layer experts, and no rotary positions.
    layers = {"no_rope_layers": [1, 0], "moe_layers": [1], "attention_chunk_size": 16}
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 2 * HIDDEN, "floor_scale": 16}
    # What four patches of a tower hold side by side.
    projector = {"projector_input_dim": HIDDEN, "projector_output_dim": HIDDEN}
    wide = {"intermediate_size": 4 * HIDDEN, "vision_output_dim": HIDDEN}
    return {
        "text_config": {**text, **layers, **experts, "head_dim": HIDDEN // HEADS},
        "vision_config": {**vision, **projector, **wide},
        "boi_token_index": ids["<|image_start|>"],
        "eoi_token_index": ids["<|image_end|>"],
        "image_token_index": ids["<|patch|>"],
        "tie_word_embeddings": False,
    }


IDEFICS_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>",
    "<global-img>", "<image>", *(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)),
)  # fmt: skip
TYPES = {
    "gemma3": TinyType(
        special=(
            "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>",
            "<end_of_image>", "<image_soft_token>",
        ),
        pad="<image_soft_token>",
        end="<end_of_turn>",
        named={
            "bos_token": "<bos>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        build_config=_build_gemma3,
        images={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            **COLORS,
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
    "gemma4": TinyType(
        special=(
            "<eos>", "<pad>", "<bos>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>",
            "<|audio>", "<|audio|>", "<audio|>", "<|video|>",
        ),
        pad="<|image|>",
        end="<turn|>",
        named={
            "bos_token": "<bos>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        build_config=_build_gemma4,
        images={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": PATCH,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 2,
        },
        processor={"processor_class": "Gemma4Processor", "image_seq_length": 70},
    ),
    "mistral3": TinyType(
        special=(
            "<pad>", "<s>", "</s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]",
            "[IMG]", "[IMG_BREAK]", "[IMG_END]",
        ),
        pad="[IMG]",
        end="</s>",
        named={"bos_token": "<s>"},
        build_config=_build_mistral3,
        images={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 4 * SIDE},
            "patch_size": {"height": PATCH, "width": PATCH},
            **COLORS,
        },
        processor={
            "processor_class": "PixtralProcessor", "patch_size": PATCH, "spatial_merge_size": 2,
        },
    ),
    "smolvlm": TinyType(
        special=IDEFICS_TOKENS,
        pad="<image>",
        end="<end_of_utterance>",
        named={"image_token": "<image>"},
        build_config=_build_smolvlm,
        images={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 4 * SIDE},
            "max_image_size": {"longest_edge": SIDE},
            **COLORS,
        },
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        template="idefics3",
    ),
    "lfm2_vl": TinyType(
        special=(
            "<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>", "<image>",
            "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_{r}_col_{c}|>" for r in range(1, 7) for c in range(1, 7)),
        ),
        pad="<image>",
        end="<|im_end|>",
        named={"bos_token": "<|startoftext|>", "image_token": "<image>"},
        build_config=_build_lfm2_vl,
        images={
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": PATCH,
            "tile_size": SIDE,
            "min_image_tokens": 2,
            "max_image_tokens": 16,
            "max_tiles": 6,
            **COLORS,
        },
        processor={"processor_class": "Lfm2VlProcessor"},
        needs_torchvision=True,
    ),
    "llama4": TinyType(
        special=(
            "<|finetune_right_pad|>", "<|begin_of_text|>", "<|header_start|>", "<|header_end|>",
            "<|eot|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>",
            "<|tile_x_separator|>", "<|tile_y_separator|>",
        ),
        pad="<|patch|>",
        end="<|eot|>",
        named={"bos_token": "<|begin_of_text|>"},
        build_config=_build_llama4,
        images={
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "max_patches": 6,
            **COLORS,
        },
        processor={"processor_class": "Llama4Processor", "patch_size": PATCH},
        needs_torchvision=True,
    ),
}  # fmt: skip
