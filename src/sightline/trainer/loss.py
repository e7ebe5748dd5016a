"""The losses, in the letters of their papers.

Letters: S trained tokens, V vocabulary; pi the trainer's policy, mu the sampler's, r = pi / mu the
ratio of a token, A its advantage. Each policy loss gives the loss of every token (S,), and which
of them a bound held.
"""

from __future__ import annotations

import torch

from sightline.compute.logprobs import mask_banned


def imitation_loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-log pi of each token (S,): supervised training, where nothing is held."""
    return -logprobs, torch.zeros_like(logprobs)


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


def cispo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(clip(r, 1-low, 1+high)) A log pi: a clipped token weighs less, and still trains."""
    r = torch.exp(logprobs - old_logprobs).detach()
    clipped = torch.clamp(r, 1 - clip_low, 1 + clip_high)
    return -clipped * advantages * logprobs, (clipped != r).float()


def truncated_importance_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(min(r, C)) A log pi: importance sampling from mu, its weights cut at C."""
    r = torch.exp(logprobs - old_logprobs).detach()
    held = torch.clamp(r, max=cap)
    return -held * advantages * logprobs, (held != r).float()


def gspo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(s A, clip(s, 1-low, 1+high) A) with s of a whole sequence, (prod r) ** (1 / length).

    `sequences` (S,) numbers the sequence of each token from 0. The gradient of s goes to each of
    its tokens: s_t = sg(s) pi / sg(pi).
    """
    num = int(sequences.max()) + 1 if len(sequences) else 0
    log_r = (logprobs - old_logprobs).detach()
    sums = log_r.new_zeros(num).index_add(0, sequences, log_r)
    lengths = log_r.new_zeros(num).index_add(0, sequences, torch.ones_like(log_r))
    log_s = (sums / lengths)[sequences]
    s = torch.exp(log_s + logprobs - logprobs.detach())
    plain = s * advantages
    clipped = torch.clamp(s, 1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(plain, clipped), (clipped < plain).float()


def exact_kl(log_p: torch.Tensor, log_q: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """KL(p || q) over the whole vocabulary, (S,) of (S, V); banned ids have no mass in either."""
    difference = mask_banned(log_p - log_q, banned, 0.0)
    return (log_p.exp() * difference).sum(-1)


def entropy(log_p: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """(S,) of (S, V)."""
    return -(log_p.exp() * mask_banned(log_p, banned, 0.0)).sum(-1)


def mismatch_kl(logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimates KL(sampler || trainer) at each sampled token: r - 1 - log r, never negative."""
    log_r = (logprobs - sampler_logprobs).double()
    return torch.expm1(log_r) - log_r
