"""Finished rows that wait for the next turn of their rollout.

A row is found by the tokens and images that its KV cache holds, compared one by one. Rows whose
last tokens are others are passed over at once: a lookup compares few rows from their start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_LAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the KV cache of a finished row holds."""

    length: int
    """Number of tokens."""
    next_position: int
    places: tuple[tuple[int, str], ...]
    """Offset and key of each image."""
    digests: dict[str, str]


class PrefixCache(dict[int, CachedPrefix]):
    """Finished rows, the one that waits longest first."""

    def take(
        self, tokens: np.ndarray, places: tuple[tuple[int, str], ...], table: np.ndarray
    ) -> tuple[int, CachedPrefix] | None:
        """The row of `table` with the longest true prefix of `tokens`, no longer in the cache."""
        fitting = [pair for pair in self.items() if pair[1].length < len(tokens)]
        for row, prefix in sorted(fitting, key=lambda pair: -pair[1].length):
            length = prefix.length
            last = slice(max(0, length - NUM_LAST_TOKENS), length)
            if (
                table[row, last].tobytes() == tokens[last].tobytes()
                and tuple(place for place in places if place[0] < length) == prefix.places
                and np.array_equal(table[row, :length], tokens[:length])
            ):
                return row, self.pop(row)
        return None

    def evict(self) -> int | None:
        """The row that waits longest, no longer in the cache."""
        row = next(iter(self), None)
        if row is not None:
            del self[row]
        return row
