"""Finished rows that wait for the next turn of their rollout, and rows that begin with a prompt.

A row is found by the tokens and items that its KV cache holds, compared one by one. Rows whose
last tokens are others are passed over at once: a lookup compares few rows from their start.
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
    """What the KV cache of a finished row holds."""

    length: int
    """Number of tokens."""
    places: ItemPlaces
    """Offset and key of each item."""
    digests: dict[str, str]


class PrefixCache(dict[int, CachedPrefix]):
    """Finished rows, the one that waits longest first."""

    def take(
        self, tokens: np.ndarray, places: ItemPlaces, table: np.ndarray
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


class PromptRows:
    """Rows whose first tokens are a prompt, computed or about to be: a group that asks the same
    computes its prompt once."""

    def __init__(self) -> None:
        self._rows: dict[PromptKey, int] = {}
        self._prompts: dict[int, tuple[PromptKey, dict[str, str]]] = {}

    def find(self, key: PromptKey) -> tuple[int, dict[str, str]] | None:
        """A row that begins with the prompt, and the digests of its items."""
        row = self._rows.get(key)
        return None if row is None else (row, self._prompts[row][1])

    def add(self, row: int, key: PromptKey, digests: dict[str, str]) -> None:
        """`row` is filled with the prompt from its start; `digests` may still come."""
        self.forget(row)
        if key not in self._rows:
            self._rows[key] = row
            self._prompts[row] = (key, digests)

    def forget(self, row: int) -> None:
        """The row holds something else, or nothing, from now on."""
        if (known := self._prompts.pop(row, None)) is not None:
            del self._rows[known[0]]
