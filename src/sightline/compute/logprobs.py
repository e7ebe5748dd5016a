"""Logprobs of chosen tokens under the distribution that is sampled from.

Both sides use this: banned ids leave the softmax, then the temperature divides. Chunked over
tokens, so that the full logits never exist at once.

Letters: S chosen tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sightline.families import Forward


def mask_banned(
    logits: torch.Tensor, banned: torch.Tensor, value: float = float("-inf")
) -> torch.Tensor:
    """`logits` with banned ids at `value`, by a mask: a compiler fuses it with what comes next."""
    return logits.masked_fill(is_banned(logits, banned), value)


def is_banned(logits: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """bool (V,): whether an id is banned."""
    none = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    return none.index_fill(0, banned, True)


def log_softmax(logits: torch.Tensor, banned: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 (S, V) of the distribution that is sampled from."""
    return torch.log_softmax(mask_banned(logits.float(), banned) / temperature, dim=-1)


def chunked_log_softmax(
    forward: Forward,
    hidden: torch.Tensor,
    banned: torch.Tensor,
    temperature: float,
    chunk: int = 4096,
) -> Iterator[tuple[slice, torch.Tensor]]:
    for start in range(0, len(hidden), chunk):
        part = slice(start, min(start + chunk, len(hidden)))
        yield part, log_softmax(forward.logits(hidden[part]), banned, temperature)


def chosen_logprobs(
    forward: Forward,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    banned: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """float32 (S,) of hidden (S, H) and the tokens (S,) that they predict."""
    parts = [
        logs.gather(-1, token_ids[part, None]).squeeze(-1)
        for part, logs in chunked_log_softmax(forward, hidden, banned, temperature)
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
