"""Loss aggregation: the weight of a trained token in the loss of its minibatch.

An aggregation function takes the number of trained tokens of every sample, and returns the weight
of each token in that sample. Weights are fixed before packing, so neither packing nor the number
of ranks changes the loss. `[algorithm] aggregation` chooses the function.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

Counts = Int[np.ndarray, " samples"]
Weights = Float[np.ndarray, " samples"]
AggregationFunction = Callable[[Counts], Weights]


def by_tokens(num_trained: Counts) -> Weights:
    """w = 1 / (all trained tokens): all tokens have the same weight."""
    return np.full(len(num_trained), 1.0 / max(int(num_trained.sum()), 1))


def by_samples(num_trained: Counts) -> Weights:
    """w = 1 / (samples x its trained tokens): all samples have the same weight."""
    samples = max(int((num_trained > 0).sum()), 1)
    return 1.0 / (samples * np.maximum(num_trained, 1))


def by_constant(num_trained: Counts, *, divisor: float = 1.0) -> Weights:
    """w = 1 / divisor: a batch of longer answers has a larger loss (Dr. GRPO)."""
    return np.full(len(num_trained), 1.0 / divisor)


AGGREGATIONS = {"tokens": by_tokens, "samples": by_samples, "constant": by_constant}
