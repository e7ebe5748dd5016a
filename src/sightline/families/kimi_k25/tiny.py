"""Writes a small Kimi K2.5 checkpoint with random weights: whole, and loadable by transformers.

Its tokenizer holds the special tokens of the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import write_json
from sightline.families.kimi_k25.tokenizer import make_pre_tokenizer
from sightline.families.tiny_checkpoint import (
    MAX_TOKENS,
    ROLE_MERGES,
    build_bpe_tokenizer,
    describe_added_tokens,
    read_options,
    save_model,
    write_files,
)

SPECIAL_TOKENS = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>",
    "<|end_header_id|>", "[EOT]", "<|im_system|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|im_middle|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>",
    "<|media_pad|>", "[UNK]", "[PAD]",
)  # fmt: skip

# Added, but not marked special, where `think_tokens` asks for them.
THINK_TOKENS = ("<think>", "</think>")

# The word in front of an image becomes one token too.
MERGES = (
    *ROLE_MERGES,
    ("i", "m"), ("a", "g"), ("ag", "e"), ("im", "age"),
    ("t", "o"), ("o", "l"), ("to", "ol"),
    ("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("<", "think"), ("<", "/"),
)  # fmt: skip


@dataclass(frozen=True)
class TinySettings:
    """The numbers of the architecture.

    `kv_lora_rank` and `rope_dim` are those of the published model: vLLM's CPU kernels for latent
    attention know no others.
    """

    type: str = "kimi_k25"
    hidden: int = 64
    layers: int = 2
    dense_layers: int = 1
    """The first layers, which have no experts."""
    heads: int = 2
    kv_lora_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 32
    value_dim: int = 32
    intermediate: int = 128
    experts: int = 4
    experts_per_token: int = 2
    expert_intermediate: int = 64
    rope_theta: float = 10_000.0
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 2
    vision_intermediate: int = 128
    vision_side: int = 8
    """Side of the grid of position embeddings, which is stretched to an image's own."""
    patch: int = 14
    merge: int = 2
    initializer_std: float = 0.05
    max_patches: int = 16384
    max_patches_per_side: int = 512
    thinking: bool = False
    """Whether a turn of the assistant is opened for reasoning."""
    think_tokens: bool = False
    """Whether the tokenizer has tokens for the marks of reasoning; else they are text."""

    def check(self) -> None:
        if self.type != "kimi_k25":
            raise FamilyError(f"no model type {self.type!r} here", "use kimi_k25")
        if not 0 < self.experts_per_token <= self.experts or self.experts < 2:
            raise FamilyError(
                f"{self.experts_per_token} of {self.experts} experts for a token",
                "use two experts or more, and no more a token than there are",
            )


def write(path: Path, seed: int = 0, **options: Any) -> None:
    """Writes the checkpoint into folder `path`; `options` are fields of `TinySettings`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    settings = read_options(TinySettings, options)
    write_files(Path(path), lambda folder: _write_all(folder, seed, settings))


def _write_all(folder: Path, seed: int, settings: TinySettings) -> None:
    tokenizer = build_tokenizer(think_tokens=settings.think_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json", build_tokenizer_config(tokenizer, settings.thinking)
    )
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    write_json(folder / "preprocessor_config.json", _build_image_processor_config(settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Kimi_K25ForConditionalGeneration(build_config(settings, tokenizer))
        _rescale_weights(model, settings)
    stops = ("<|im_end|>", "[EOS]")
    save_model(folder, model, model.state_dict(), tokenizer, stops, pad="[PAD]")


def _rescale_weights(model: Any, settings: TinySettings) -> None:
    """Brings weights to the scale of the rest of a model this narrow."""
    # transformers draws these with deviation 1, which would drown the pixels.
    positions = model.model.vision_tower.patch_embed.pos_emb.position_embeddings
    positions.data.mul_(settings.initializer_std)
    # The latent is wider than the model: at full size each step of Adam would move keys and
    # values that much more than it moves anything else.
    width = settings.kv_lora_rank / settings.hidden
    for layer in model.model.language_model.layers:
        layer.self_attn.kv_a_layernorm.weight.data.div_(width)
        layer.self_attn.kv_b_proj.weight.data.mul_(width**0.5)


def build_tokenizer(
    merges: Sequence[tuple[str, str]] = MERGES, think_tokens: bool = False
) -> Tokenizer:
    plain = THINK_TOKENS if think_tokens else ()
    return build_bpe_tokenizer(merges, make_pre_tokenizer(), SPECIAL_TOKENS, plain)


def build_config(settings: TinySettings, tokenizer: Tokenizer) -> Kimi_K25Config:
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "first_k_dense_replace": settings.dense_layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "q_lora_rank": None,
        "kv_lora_rank": settings.kv_lora_rank,
        "qk_rope_head_dim": settings.rope_dim,
        "qk_nope_head_dim": settings.nope_dim,
        "v_head_dim": settings.value_dim,
        "intermediate_size": settings.intermediate,
        "moe_intermediate_size": settings.expert_intermediate,
        "n_routed_experts": settings.experts,
        "num_experts_per_tok": settings.experts_per_token,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": settings.initializer_std,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id("[BOS]"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "dtype": "float32",
    }
    vision = {
        "hidden_size": settings.vision_hidden,
        "num_hidden_layers": settings.vision_layers,
        "num_attention_heads": settings.vision_heads,
        "intermediate_size": settings.vision_intermediate,
        "pos_emb_height": settings.vision_side,
        "pos_emb_width": settings.vision_side,
        "patch_size": settings.patch,
        "merge_kernel_size": [settings.merge, settings.merge],
        "rope_parameters": {"rope_type": "axial", "rope_theta": settings.rope_theta},
        "initializer_range": settings.initializer_std,
        "dtype": "float32",
    }
    return Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=settings.vision_hidden,
        image_token_id=tokenizer.token_to_id("<|media_pad|>"),
        # Past the vocabulary, as in the published model: there are no videos here.
        video_token_id=tokenizer.get_vocab_size(with_added_tokens=True),
        vision_start_token_id=tokenizer.token_to_id("<|media_begin|>"),
        vision_end_token_id=tokenizer.token_to_id("<|media_end|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )


def build_tokenizer_config(tokenizer: Tokenizer, thinking: bool = False) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": describe_added_tokens(tokenizer),
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_TOKENS,
        "thinking": thinking,
    }


def _build_image_processor_config(settings: TinySettings) -> dict[str, Any]:
    values = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "processor_class": "Kimi_K25Processor",
        # The names of transformers' processor, which reads them at the top.
        **values,
        "patch_size": settings.patch,
        "merge_size": settings.merge,
        "max_patches": settings.max_patches,
        "size": {
            "max_height": settings.max_patches_per_side,
            "max_width": settings.max_patches_per_side,
        },
        # The names of the published folder.
        "media_proc_cfg": {
            **values,
            "patch_size": settings.patch,
            "merge_kernel_size": settings.merge,
            "in_patch_limit": settings.max_patches,
            "patch_limit_on_one_side": settings.max_patches_per_side,
            "fixed_output_tokens": None,
            # Of videos, which nothing here shows; vLLM reads them before it serves anything.
            "in_patch_limit_each_frame": settings.max_patches // 4,
            "in_patch_limit_video": None,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
        },
    }
