"""Samples tokens from logits. A token's logprob is that of the distribution it was drawn from.

Banned ids are masked first. Then logits are divided by the temperature and filtered by min-p, top-k
and top-p. Temperature 0 picks the most likely token, with its logprob at temperature 1.

Each token is drawn with one uniform number that depends only on the seed and the token's index. A
seeded request therefore draws the same tokens in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, UInt64
from torch import Tensor

from sightline.compute.logprobs import BannedIds, Logits, log_softmax, mask_banned
from sightline.compute.weights_digest import GOLDEN, splitmix64
from sightline.families.device_copy import copy_to_device


class SamplingMetadata(NamedTuple):
    """Sampling settings of the rows that sample."""

    temperature: Float[np.ndarray, " rows"]
    top_k: Int[np.ndarray, " rows"]
    top_p: Float[np.ndarray, " rows"]
    min_p: Float[np.ndarray, " rows"]
    uniform: Float64[np.ndarray, " rows"]

    @property
    def is_plain(self) -> Bool[np.ndarray, " rows"]:
        """Mask of the rows without filters."""
        return (self.top_k == 0) & (self.top_p >= 1) & (self.min_p == 0)

    def select(self, rows: Int[np.ndarray, " chosen"]) -> SamplingMetadata:
        return SamplingMetadata(*(values[rows] for values in self))


def draw_uniforms(
    seeds: UInt64[np.ndarray, " rows"], index: Int[np.ndarray, " rows"]
) -> Float64[np.ndarray, " rows"]:
    """Return numbers in [0, 1) that depend only on the mixed seed and the token index."""
    bits = splitmix64(seeds + (index.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return (bits >> np.uint64(11)) * 2.0**-53


def draw_samples(
    logits: Logits, banned: BannedIds, settings: SamplingMetadata, exact: bool = False
) -> Float64[Tensor, "2 tokens"]:
    """Return tokens and their logprobs, on the logits' device. A float64 stores any id exactly.

    Rows whose logits are not finite get NaN. Rows with filters are drawn separately: the others
    need no sort, and their bits do not change. `exact` logprobs equal the trainer's bit for bit.
    """
    is_plain = settings.is_plain
    if is_plain.all() or not is_plain.any():
        return _draw_alike(logits, banned, settings, exact)
    drawn = logits.new_empty((2, len(logits)), dtype=torch.float64)
    for rows in (np.flatnonzero(is_plain), np.flatnonzero(~is_plain)):
        at = copy_to_device(rows, logits.device)
        drawn[:, at] = _draw_alike(logits[at], banned, settings.select(rows), exact)
    return drawn


def _draw_alike(
    logits: Logits, banned: BannedIds, settings: SamplingMetadata, exact: bool
) -> Float64[Tensor, "2 tokens"]:
    """Sample rows that either all have filters or all have none."""
    is_plain = bool(settings.is_plain.all())
    if logits.is_cuda and is_plain:
        return _sample_on_gpu(logits, banned, settings, exact)
    greedy = settings.temperature == 0
    scale = np.where(greedy, np.float32(1), settings.temperature)
    allowed = mask_banned(logits.float(), banned)
    scaled = allowed
    if (scale != 1).any():
        scaled = allowed / torch.from_numpy(scale).to(logits.device)[:, None]
    if not is_plain:
        scaled = _apply_filters(scaled, settings)
    logs = torch.log_softmax(scaled, dim=-1)
    if greedy.all():
        picks = allowed.argmax(-1)
    else:
        picks = _draw_tokens(logs, torch.from_numpy(settings.uniform).to(logits.device))
        if greedy.any():
            is_greedy = torch.from_numpy(greedy).to(logits.device)
            picks = torch.where(is_greedy, allowed.argmax(-1), picks)
    chosen = logs.gather(-1, picks[:, None]).squeeze(-1)
    return torch.stack([picks.double(), chosen.double()])


def _sample_on_gpu(
    logits: Logits, banned: BannedIds, settings: SamplingMetadata, exact: bool
) -> Float64[Tensor, "2 tokens"]:
    """Sample plain rows in one pass over the logits. `exact` logprobs take more passes."""
    from sightline.compute.triton_kernels import sample_tokens

    is_banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    is_banned.index_fill_(0, banned, True)
    host_values = np.stack([settings.temperature.astype(np.float64), settings.uniform])
    temperature, uniform = copy_to_device(host_values, logits.device)
    tokens, logprobs = sample_tokens(logits, is_banned, temperature.float(), uniform)
    if exact:
        scale = torch.where(temperature == 0, 1.0, temperature).float()[:, None]
        logprobs = log_softmax(logits, banned, scale).gather(-1, tokens[:, None])[:, 0]
    return torch.stack([tokens.double(), logprobs.double()])


def _draw_tokens(logs: Logits, uniform: Float64[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Return the first token whose cumulative probability exceeds the uniform number's share.

    A token with probability 0 does not change the sum, so it is never the first.
    """
    sums = logs.double().exp().cumsum(-1)
    total = sums[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)
    picks = torch.searchsorted(sums, target[:, None], right=True).squeeze(-1)
    return picks.clamp_(max=logs.shape[-1] - 1)


def _apply_filters(scaled: Logits, settings: SamplingMetadata) -> Logits:
    device, lowest = scaled.device, float("-inf")
    if settings.min_p.any():
        least = torch.from_numpy(settings.min_p).to(device)[:, None]
        probs = scaled.softmax(-1)
        scaled = scaled.masked_fill(probs < least * probs.amax(-1, keepdim=True), lowest)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=device)
    top_k = torch.from_numpy(np.where(settings.top_k > 0, settings.top_k, scaled.shape[-1]))
    ordered = ordered.masked_fill(rank >= top_k.to(device)[:, None], lowest)
    probs = ordered.double().softmax(-1)
    # Drop a token if the tokens before it already fill top_p.
    full = probs.cumsum(-1) - probs >= torch.from_numpy(settings.top_p).to(device)[:, None]
    full &= torch.from_numpy(settings.top_p < 1).to(device)[:, None]
    full[:, 0] = False
    ordered = ordered.masked_fill(full, lowest)
    return torch.full_like(scaled, lowest).scatter(-1, order, ordered)
