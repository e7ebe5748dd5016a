"""Find the side to suspect when the logprobs of sampler and trainer differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from sightline.pack import take_sequences
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.probe import Score

MAX_SEQUENCES = 8
"""Sequences of one micro-batch that are computed alone."""
SERVER = (
    "The trainer computes the same logprobs for a sequence alone, so suspect the server: if all "
    "tokens differ, its weights or dtype differ. If only tokens after images differ, its pixels "
    "differ. Fix the server and start a new run"
)
EITHER = (
    "Score a trace again with `sightline trace replay`: if the server then gives the trainer's "
    "logprobs, suspect its caches or weights. If it gives its own again, compare both sides with "
    "transformers"
)


def measure_packing(ready: ReadyBatch, score: Score) -> float:
    """Return the KL per token between logprobs computed packed and alone.

    Of several sequences in a micro-batch, this is the one with the largest KL.
    """
    largest = max(ready.micro_batches, key=lambda micro_batch: len(micro_batch.batch.trained))
    worst = 0.0
    for _, packed in replace(ready, micro_batches=[largest]).iterate_with_pixels():
        logprobs = score(packed).astype(np.float64)
        for single in islice(take_sequences(packed.batch), MAX_SEQUENCES):
            log_ratio = logprobs[single.trains] - score(packed.take(single))
            worst = max(worst, float((np.expm1(log_ratio) - log_ratio).mean()))
    return worst


def describe_suspect(ready: ReadyBatch, learner: Learner, limit: float) -> str:
    """Say which side to suspect. Several ranks do not compute a sequence alone."""
    if learner.dims.is_distributed:
        return EITHER
    kl = measure_packing(ready, learner.score)
    if kl <= limit:
        return SERVER
    return (
        f"Suspect the trainer: it computes different logprobs for a sequence alone and packed with "
        f"others (KL {kl:.3g} per token). Check [trainer] compile_backend, and for a generic "
        "model, report the checkpoint's type"
    )
