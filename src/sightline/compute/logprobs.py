"""Logprobs of chosen tokens under the sampling distribution.

Trainer and engine share this code: banned ids are masked, then logits are divided by the
temperature. Tokens are processed in chunks, so that the full logits are never in memory.
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
    """Set banned ids to `value`, with a mask that a compiler can fuse with later operations."""
    none = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    return logits.masked_fill(none.index_fill(0, banned, True), value)


Temperature = float | Float[Tensor, "#tokens 1"]
"""A number, or a tensor in exact mode: a GPU multiplies by the inverse of a number instead."""


def log_softmax(logits: Logits, banned: BannedIds, temperature: Temperature) -> Logits:
    """Return the log-probabilities of the sampling distribution, in float32."""
    return torch.log_softmax(mask_banned(logits.float(), banned) / temperature, dim=-1)


def chosen_logprobs(
    forward: Forward,
    hidden: Hidden,
    token_ids: TokenIds,
    banned: BannedIds,
    temperature: Temperature,
) -> Float[Tensor, " tokens"]:
    """Return the float32 logprobs of `token_ids`, each predicted by its state in `hidden`."""
    parts = [
        log_softmax(forward.logits(part), banned, temperature).gather(-1, ids[:, None]).squeeze(-1)
        for part, ids in zip(hidden.split(CHUNK_TOKENS), token_ids.split(CHUNK_TOKENS), strict=True)
    ]
    return torch.cat(parts)
