"""Loss aggregation: what a trained token weighs in the loss of its batch.

An aggregation function takes the number of trained tokens of every sample of a batch, and returns
the weight of each token of that sample. The weights are fixed before the batch is packed, so that
neither packing nor the number of ranks changes the loss. Chosen by `[algorithm] aggregation`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

Counts = Int[np.ndarray, " samples"]
Weights = Float[np.ndarray, " samples"]
AggregationFunction = Callable[[Counts], Weights]


def by_tokens(num_trained: Counts) -> Weights:
    """w = 1 / (all trained tokens): every token of a batch weighs the same."""
    return np.full(len(num_trained), 1.0 / max(int(num_trained.sum()), 1))


def by_samples(num_trained: Counts) -> Weights:
    """w = 1 / (samples x own trained tokens): every sample of a batch weighs the same."""
    samples = max(int((num_trained > 0).sum()), 1)
    return 1.0 / (samples * np.maximum(num_trained, 1))


def by_constant(num_trained: Counts, *, divisor: float = 1.0) -> Weights:
    """w = 1 / divisor: a batch of longer answers has a larger loss (Dr. GRPO)."""
    return np.full(len(num_trained), 1.0 / divisor)


AGGREGATIONS = {"tokens": by_tokens, "samples": by_samples, "constant": by_constant}
