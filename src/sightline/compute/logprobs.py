"""Logprobs of chosen tokens under the distribution that is sampled from.

Both sides use this: banned ids leave the softmax, then the temperature divides. Chunked over
tokens, so that the full logits never exist at once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightline.families import Forward

CHUNK_TOKENS = 4096

Hidden = Float[Tensor, "tokens hidden"]
Logits = Float[Tensor, "tokens vocab"]
TokenIds = Int[Tensor, " tokens"]
BannedIds = Int[Tensor, " ids"]


def mask_banned(logits: Logits, banned: BannedIds, value: float = float("-inf")) -> Logits:
    """`logits` with banned ids at `value`, by a mask: a compiler fuses it with what comes next."""
    none = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    return logits.masked_fill(none.index_fill(0, banned, True), value)


Temperature = float | Float[Tensor, "#tokens 1"]
"""A number, or, where bits count, a tensor: by a number a GPU does not divide but multiply."""


def log_softmax(logits: Logits, banned: BannedIds, temperature: Temperature) -> Logits:
    """The distribution that is sampled from, in float32."""
    return torch.log_softmax(mask_banned(logits.float(), banned) / temperature, dim=-1)


def chosen_logprobs(
    forward: Forward,
    hidden: Hidden,
    token_ids: TokenIds,
    banned: BannedIds,
    temperature: Temperature,
) -> Float[Tensor, " tokens"]:
    """Those of `token_ids`, which `hidden` predict, in float32."""
    parts = [
        log_softmax(forward.logits(part), banned, temperature).gather(-1, ids[:, None]).squeeze(-1)
        for part, ids in zip(hidden.split(CHUNK_TOKENS), token_ids.split(CHUNK_TOKENS), strict=True)
    ]
    return torch.cat(parts)
