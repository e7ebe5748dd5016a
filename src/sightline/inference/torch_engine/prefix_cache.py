"""Finished rows that wait for the next turn of their rollout.

A row is found by a hash of the tokens and images that its KV cache holds, and verified token by
token. Hashes of all prefixes of a prompt come from one running sum, so a lookup costs
one pass over the prompt and one dictionary access for each distinct length.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sightline.wire import Slot

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the KV cache of a finished row holds."""

    length: int
    """Number of tokens."""
    hash: int
    next_position: int
    places: tuple[tuple[int, str], ...]
    """Offset and key of each image."""
    digests: dict[str, str]


class PrefixHash:
    """Sum of (token + 1) * factor**index, modulo 2**64; an image's key stands for its first pad."""

    def __init__(self, max_model_len: int) -> None:
        powers = np.full(max_model_len, _FACTOR, dtype=np.uint64)
        self._powers = np.multiply.accumulate(powers)

    def prefixes(
        self, tokens: np.ndarray, slots: Sequence[Slot], keys: Sequence[str]
    ) -> np.ndarray:
        """uint64 (T,): the hash of tokens[:i+1]."""
        values = tokens.astype(np.uint64)
        for slot, key in zip(slots, keys, strict=True):
            values[slot.offset] = int(key[:15], 16)
        values += np.uint64(1)
        values *= self._powers[: len(values)]
        sums: np.ndarray = np.cumsum(values, dtype=np.uint64)
        return sums

    def extend(self, hash_before: int, tokens: np.ndarray, offset: int) -> int:
        """The hash after `tokens`, text only, that follow at `offset`."""
        values = tokens.astype(np.uint64) + np.uint64(1)
        values *= self._powers[offset : offset + len(values)]
        return (hash_before + int(values.sum(dtype=np.uint64))) & _MASK


class PrefixCache:
    """Least recently used goes first."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, CachedPrefix] = OrderedDict()
        self._rows: dict[tuple[int, int], list[int]] = {}
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._cached)

    def put(self, row: int, prefix: CachedPrefix) -> None:
        self._cached[row] = prefix
        self._rows.setdefault((prefix.length, prefix.hash), []).append(row)
        self._lengths[prefix.length] += 1

    def take(
        self,
        tokens: np.ndarray,
        hashes: np.ndarray,
        places: tuple[tuple[int, str], ...],
        table: np.ndarray,
    ) -> tuple[int, CachedPrefix] | None:
        """The row with the longest true prefix of `tokens`, no longer in the cache."""
        fitting = sorted((n for n in self._lengths if n < len(tokens)), reverse=True)
        for length in fitting:
            for row in self._rows.get((length, int(hashes[length - 1])), ()):
                prefix = self._cached[row]
                before = tuple(place for place in places if place[0] < length)
                if before == prefix.places and np.array_equal(table[row, :length], tokens[:length]):
                    self._drop(row)
                    return row, prefix
        return None

    def evict(self) -> int | None:
        """The row that waits longest, no longer in the cache."""
        if not self._cached:
            return None
        row = next(iter(self._cached))
        self._drop(row)
        return row

    def clear(self) -> list[int]:
        rows = list(self._cached)
        self._cached.clear()
        self._rows.clear()
        self._lengths.clear()
        return rows

    def _drop(self, row: int) -> None:
        prefix = self._cached.pop(row)
        key = (prefix.length, prefix.hash)
        self._rows[key].remove(row)
        if not self._rows[key]:
            del self._rows[key]
        self._lengths -= Counter([prefix.length])  # drops a length that no row has any more
