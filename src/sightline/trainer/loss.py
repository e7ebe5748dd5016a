"""The losses, in the letters of their papers.

Letters: S trained tokens, V vocabulary; r the ratio of trainer to sampler, A the advantage.
"""

from __future__ import annotations

import torch


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, 1-low, 1+high) A) of each token (S,), and whether the clip held it."""
    r = torch.exp(logprobs - old_logprobs)
    plain = r * advantages
    clipped = torch.clamp(r, 1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(plain, clipped), (clipped < plain).float()


def exact_kl(log_p: torch.Tensor, log_q: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """KL(p || q) over the whole vocabulary, (S,) of (S, V); banned ids have no mass in either."""
    difference = (log_p - log_q).index_fill(-1, banned, 0.0)
    return (log_p.exp() * difference).sum(-1)


def entropy(log_p: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """(S,) of (S, V)."""
    return -(log_p.exp() * log_p.index_fill(-1, banned, 0.0)).sum(-1)


def mismatch_kl(logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimates KL(sampler || trainer) at each sampled token: r - 1 - log r, never negative."""
    log_r = (logprobs - sampler_logprobs).double()
    return torch.expm1(log_r) - log_r
