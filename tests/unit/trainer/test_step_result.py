"""The scores and the mismatch of a step belong to the tokens that they were computed from."""

from __future__ import annotations

from pathlib import Path

import making
import numpy as np
import pytest

from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pack import PackSize, pack
from sightline.trainer.step_result import build_step_scores, sum_mismatch
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.sample import Sample


def score(samples: list[Sample], model: Path, by: float) -> list[tuple[MicroBatch, np.ndarray]]:
    """Return micro-batches with a trainer's logprobs that exceed the sampler's `by` a constant."""
    batches = pack(samples, 3, load_family(model), PackSize(200, 10**6))
    assert len(batches) > 1
    return [(batch, batch.logprobs.numpy() + np.float32(by)) for batch in batches]


def test_scores_of_a_step_belong_to_their_tokens(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=6, seed=5)
    scores = build_step_scores(3, score(samples, tiny_model, by=0.25))
    logprobs, ratios = scores.logprobs.numpy(), scores.ratios.numpy()
    for sample in samples:
        own = [o for o in scores.origins if o.trace_id == sample.trace_id]
        places = np.concatenate([np.arange(o.start, o.stop) for o in own])
        np.testing.assert_allclose(logprobs[places], sample.logprobs.numpy() + 0.25, rtol=1e-6)
        np.testing.assert_allclose(ratios[places], np.exp(0.25), rtol=1e-5)
        assert np.array_equal(scores.advantages.numpy()[places], sample.get_advantages())


def test_mismatch_is_that_of_the_newest_version(tiny_model: Path, store: MediaStore) -> None:
    fresh = making.samples(tiny_model, store, count=4, seed=6, version=2)
    older = making.samples(tiny_model, store, count=4, seed=7, version=1)
    near, far = score(fresh, tiny_model, by=0.1), score(older, tiny_model, by=1.0)
    sums = sum_mismatch(3, near + far)
    num_fresh, num_older = (sum(len(s.trained) for s in group) for group in (fresh, older))
    assert (sums["fresh_tokens"], sums["older_tokens"]) == (num_fresh, num_older)
    assert sums["fresh_kl"] == pytest.approx(num_fresh * (np.exp(0.1) - 1.1), rel=1e-3)
    assert sums["older_kl"] == pytest.approx(num_older * (np.exp(1.0) - 2.0), rel=1e-3)
