"""What a sample costs a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sightline.wire.sample import Sample


@dataclass(frozen=True, slots=True)
class Cost:
    tokens: int
    patches: int

    @classmethod
    def of(cls, sample: Sample) -> Cost:
        patches = sum(int(np.prod(item.grid)) for item in sample.items)
        return cls(len(sample.token_ids), patches)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.patches + other.patches)

    def fits(self, limit: Cost) -> bool:
        return self.tokens <= limit.tokens and self.patches <= limit.patches
