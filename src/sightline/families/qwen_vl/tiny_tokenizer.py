"""The tokenizer of the small checkpoints, with every added token of the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from sightline.families.tiny_checkpoint import (
    MAX_TOKENS,
    ROLE_MERGES,
    build_bpe_tokenizer,
    describe_added_tokens,
)

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

# Added, but not marked special: they survive `skip_special_tokens`.
PLAIN_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip

# How Qwen's tokenizers cut text into words before BPE.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(merges: Sequence[tuple[str, str]] = ROLE_MERGES) -> Tokenizer:
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    normalizer = normalizers.NFC()
    return build_bpe_tokenizer(merges, pre_tokenizer, SPECIAL_TOKENS, PLAIN_TOKENS, normalizer)


def build_tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": describe_added_tokens(tokenizer),
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": MAX_TOKENS,
    }
