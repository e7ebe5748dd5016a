"""The tokenizer of the small checkpoints: byte-level with a handful of merges.

It needs no training corpus and is the same everywhere, and holds every added token of the real
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

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

# Each role becomes one token. A merge must stand behind the merges that make its halves.
MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"),
    ("a", "s"), ("s", "i"), ("s", "t"), ("a", "n"), ("as", "si"), ("st", "an"), ("stan", "t"),
    ("assi", "stant"),
    ("s", "y"), ("e", "m"), ("sy", "st"), ("syst", "em"),
)  # fmt: skip

# How Qwen's tokenizers cut text into words before BPE.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MAX_TOKENS = 32768


def build_tokenizer(merges: Sequence[tuple[str, str]] = MERGES) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [left + right for left, right in merges]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges), fuse_unk=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
        + [AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS]
    )
    return tokenizer


def build_tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + PLAIN_TOKENS
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
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
