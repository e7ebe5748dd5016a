"""Lookup of finished rows that a new turn can continue, and of rows that hold a prompt.

A row matches if all tokens and items in its KV cache match. The last tokens are compared first, so
that a lookup compares few rows in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_LAST_TOKENS = 16
ItemPlaces = tuple[tuple[int, str], ...]
PromptKey = tuple[bytes, ItemPlaces]
"""The tokens of a prompt, and the offset and key of each item."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The content of a finished row's KV cache."""

    length: int
    places: ItemPlaces
    """Offset and key of each item."""
    digests: dict[str, str]


class PrefixCache(dict[int, CachedPrefix]):
    """Finished rows, oldest first."""

    def take(
        self, tokens: np.ndarray, places: ItemPlaces, table: np.ndarray
    ) -> tuple[int, CachedPrefix] | None:
        """Remove and return the row of `table` with the longest proper prefix of `tokens`."""
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
        """Remove and return the oldest row."""
        row = next(iter(self), None)
        if row is not None:
            del self[row]
        return row


class PromptRows(dict[PromptKey, tuple[int, dict[str, str]]]):
    """A row that begins with each prompt, and the digests of its items.

    The row may still compute the prompt, so that a group computes it only once.
    """

    def add(self, row: int, key: PromptKey, digests: dict[str, str]) -> None:
        """Record that `row` begins with the prompt. `digests` may be filled later."""
        self.forget(row)
        self.setdefault(key, (row, digests))

    def forget(self, row: int) -> None:
        """Drop a row that no longer holds its prompt."""
        for key in [key for key, entry in self.items() if entry[0] == row]:
            del self[key]
