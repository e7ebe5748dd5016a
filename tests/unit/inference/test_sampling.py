"""Sampling: reproducible, unbiased, and never a token of probability 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sightline.inference.torch_engine import sampling
from sightline.inference.torch_engine.sampling import (
    SamplingMetadata,
    draw_samples,
    draw_uniforms,
    splitmix64,
)

NONE = torch.zeros(0, dtype=torch.long)


def settings(uniform: np.ndarray, temperature: float | np.ndarray = 1.0) -> SamplingMetadata:
    size = len(uniform)
    return SamplingMetadata(
        temperature=np.broadcast_to(np.float32(temperature), (size,)).astype(np.float32),
        top_k=np.zeros(size, dtype=np.int64),
        top_p=np.ones(size, dtype=np.float32),
        min_p=np.zeros(size, dtype=np.float32),
        uniform=uniform,
    )


def sample(
    logits: torch.Tensor, banned: torch.Tensor, settings: SamplingMetadata
) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs = draw_samples(logits, banned, settings).numpy()
    return tokens.astype(np.int64), logprobs.astype(np.float32)


def splitmix64_int(value: int) -> int:
    """The finalizer of splitmix64 on one number, in Python's own arithmetic."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def test_uniforms_depend_only_on_seed_and_index() -> None:
    seeds = np.full(20_000, splitmix64_int(7), dtype=np.uint64)
    drawn = draw_uniforms(seeds, np.arange(20_000))
    assert (drawn[5:9] == draw_uniforms(seeds[:4], np.arange(5, 9))).all()
    assert drawn.min() >= 0 and drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert abs(counts - 1000).max() < 150
    other = draw_uniforms(np.full(100, splitmix64_int(8), dtype=np.uint64), np.arange(100))
    assert not np.isin(other, drawn).any()


def test_splitmix64_matches_for_scalars_and_arrays() -> None:
    values = [0, 1, 2**63, 2**64 - 1]
    assert splitmix64(np.array(values, dtype=np.uint64)).tolist() == [
        splitmix64_int(v) for v in values
    ]


def test_token_frequencies_match_their_reported_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(8000, 4)
    uniform = draw_uniforms(np.full(8000, splitmix64_int(1), dtype=np.uint64), np.arange(8000))
    tokens, logprobs = sample(logits, NONE, settings(uniform, 0.5))
    expected = (logits[0] / 0.5).softmax(-1).numpy()
    np.testing.assert_allclose(np.bincount(tokens) / 8000, expected, atol=0.02)
    np.testing.assert_allclose(np.exp(logprobs), expected[tokens], rtol=1e-5)


def test_banned_ids_are_not_drawn_at_either_end_of_the_interval() -> None:
    logits = torch.tensor([[50.0, 0.0, 0.0, 50.0]]).expand(3, 4)
    edges = np.array([0.0, 0.5, np.nextafter(1.0, 0.0)])
    tokens, _ = sample(logits, torch.tensor([0, 3]), settings(edges))
    assert set(tokens.tolist()) <= {1, 2}


def test_rows_of_one_batch_keep_their_own_temperatures() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(2, 3)
    temperature = np.array([0.0, 2.0], dtype=np.float32)
    tokens, logprobs = sample(logits, NONE, settings(np.array([0.01, 0.01]), temperature))
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(
        logprobs, [logits[0].log_softmax(-1)[1], (logits[1] / 2).log_softmax(-1)[0]], rtol=1e-5
    )


def test_row_with_nan_logits_is_reported() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    _, logprobs = sample(logits, NONE, settings(np.array([0.5, 0.5])))
    assert np.isnan(logprobs[0]) and np.isfinite(logprobs[1])


def test_filtered_rows_are_sampled_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sorted_rows: list[int] = []
    apply_filters = sampling._apply_filters

    def count(scaled: torch.Tensor, given: SamplingMetadata) -> torch.Tensor:
        sorted_rows.append(len(scaled))
        return apply_filters(scaled, given)

    monkeypatch.setattr(sampling, "_apply_filters", count)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    plain = settings(np.linspace(0.05, 0.95, 6), 0.7)
    top_p, top_k = plain.top_p.copy(), plain.top_k.copy()
    top_p[1], top_k[4] = 0.3, 2
    mixed = plain._replace(top_p=top_p, top_k=top_k)
    assert mixed.is_plain.tolist() == [True, False, True, True, False, True]
    tokens, logprobs = sample(logits, NONE, mixed)
    assert sorted_rows == [2]
    for row in range(6):
        alone = sample(logits[row : row + 1], NONE, mixed.select(np.array([row])))
        assert (tokens[row], logprobs[row]) == (alone[0][0], alone[1][0])
