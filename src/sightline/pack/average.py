"""What a trained token weighs in the loss of its batch, whatever rank or pack it goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sightline.wire.sample import Sample


@dataclass(frozen=True, slots=True)
class Average:
    by: Literal["tokens", "samples", "constant"] = "tokens"
    constant: float = 1.0

    def of(self, samples: Sequence[Sample]) -> Callable[[Sample], float]:
        """The weight of each token of a sample; but for a constant, a batch adds up to 1."""
        if self.by == "constant":
            return lambda sample: 1.0 / self.constant
        if self.by == "tokens":
            total = sum(len(sample.trained) for sample in samples)
            return lambda sample: 1.0 / max(total, 1)
        num = sum(1 for sample in samples if len(sample.trained))
        return lambda sample: 1.0 / (max(num, 1) * max(len(sample.trained), 1))


AVERAGE = Average()
