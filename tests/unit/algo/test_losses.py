"""Losses against naive float64 implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sightline.algo import losses as loss
from sightline.algo.losses import LossInputs


def test_clipped_loss_matches_the_paper() -> None:
    rng = np.random.default_rng(0)
    new, old, advantages = -rng.random(50) * 3, -rng.random(50) * 3, rng.normal(size=50)
    loss_values, clipped, gradient = taken(
        loss.ppo, new, old, advantages, clip_low=0.2, clip_high=0.28
    )
    for i in range(50):
        r = math.exp(new[i] - old[i])
        bounded = min(max(r, 0.8), 1.28)
        want = -min(r * advantages[i], bounded * advantages[i])
        assert float(loss_values[i]) == pytest.approx(want, rel=1e-12)
        assert bool(clipped[i]) == (bounded * advantages[i] < r * advantages[i])
        slope = 0.0 if clipped[i] else -r * advantages[i]
        assert gradient[i] == pytest.approx(slope, rel=1e-12)


def test_the_exact_kl_sums_over_the_vocabulary_without_banned_ids() -> None:
    torch.manual_seed(0)
    banned = torch.tensor([1, 4])
    logits = [torch.randn(3, 6, dtype=torch.float64) for _ in range(2)]
    logs = [torch.log_softmax(x.index_fill(-1, banned, -math.inf), -1) for x in logits]
    exact_kl = loss.exact_kl(logs[0], logs[1], banned)
    for row in range(3):
        want = sum(
            math.exp(logs[0][row, i]) * float(logs[0][row, i] - logs[1][row, i])
            for i in (0, 2, 3, 5)
        )
        assert float(exact_kl[row]) == pytest.approx(want, rel=1e-12)


def test_the_mismatch_is_zero_for_equal_logprobs_and_never_negative() -> None:
    old = torch.tensor([-1.0, -2.0, -3.0])
    assert (loss.mismatch_kl(old, old) == 0).all()
    assert (loss.mismatch_kl(old + torch.tensor([0.1, -0.2, 1e-6]), old) >= 0).all()


def drawn(num: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return -rng.random(num) * 3, -rng.random(num) * 3, rng.normal(size=num)


def taken(function, new, old, advantages, sequences=None, **args):  # type: ignore[no-untyped-def]
    """Return each token's loss, which tokens were clipped, and the gradient of the sum."""
    logprobs = torch.tensor(new, requires_grad=True)
    ids = np.zeros(len(new), dtype=np.int64) if sequences is None else sequences
    inputs = LossInputs(logprobs, *(torch.tensor(x) for x in (old, advantages, ids)))
    losses, clipped = function(inputs, **args)
    losses.sum().backward()
    return losses.detach().numpy(), clipped.numpy(), logprobs.grad.numpy()


def test_cispo_clips_the_weight_and_trains_every_token() -> None:
    new, old, advantages = drawn()
    loss_values, clipped, gradient = taken(
        loss.cispo, new, old, advantages, clip_low=0.2, clip_high=0.28
    )
    for i in range(50):
        r = math.exp(new[i] - old[i])
        weight = min(max(r, 0.8), 1.28)
        assert loss_values[i] == pytest.approx(-weight * advantages[i] * new[i], rel=1e-12)
        assert gradient[i] == pytest.approx(-weight * advantages[i], rel=1e-12)
        assert bool(clipped[i]) == (weight != r)
    assert clipped.any() and (gradient != 0).all()


def test_truncated_importance_sampling_cuts_only_large_weights() -> None:
    new, old, advantages = drawn()
    loss_values, clipped, gradient = taken(loss.tis, new, old, advantages, ratio_cap=2.0)
    for i in range(50):
        weight = min(math.exp(new[i] - old[i]), 2.0)
        assert loss_values[i] == pytest.approx(-weight * advantages[i] * new[i], rel=1e-12)
        assert gradient[i] == pytest.approx(-weight * advantages[i], rel=1e-12)
    assert 0 < clipped.sum() < 50


def test_gspo_uses_one_ratio_per_sequence() -> None:
    new, old, advantages = drawn()
    old = new + (old - new) * 0.3
    sequences = np.repeat(np.arange(5), [3, 17, 1, 20, 9])
    loss_values, held, gradient = taken(
        loss.gspo, new, old, advantages, sequences, clip_low=0.05, clip_high=0.08
    )
    for k in range(5):
        own = np.flatnonzero(sequences == k)
        s = math.exp(sum(new[i] - old[i] for i in own) / len(own))
        for i in own:
            plain, clipped = s * advantages[i], min(max(s, 0.95), 1.08) * advantages[i]
            assert loss_values[i] == pytest.approx(-min(plain, clipped), rel=1e-12)
            assert bool(held[i]) == (clipped < plain)
            want = 0.0 if clipped < plain else -s * advantages[i]
            assert gradient[i] == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert 0 < held.sum() < 50
