"""Rows that wait for their next turn are found by what they hold, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from sightline.inference.torch_engine.prefix_cache import CachedPrefix, PrefixCache, PrefixHash

TABLE = np.zeros((8, 32), dtype=np.int32)


@pytest.fixture
def hasher() -> PrefixHash:
    return PrefixHash(32)


def put(
    cache: PrefixCache,
    hasher: PrefixHash,
    row: int,
    tokens: list[int],
    places: tuple[tuple[int, str], ...] = (),
) -> None:
    TABLE[row, : len(tokens)] = tokens
    hashes = hasher.prefixes(np.array(tokens, dtype=np.int32), [], [])
    cache.put(row, CachedPrefix(len(tokens), int(hashes[-1]), len(tokens), places, {}))


def take(
    cache: PrefixCache,
    hasher: PrefixHash,
    tokens: list[int],
    places: tuple[tuple[int, str], ...] = (),
) -> int | None:
    array = np.array(tokens, dtype=np.int32)
    found = cache.take(array, hasher.prefixes(array, [], []), places, TABLE)
    return None if found is None else found[0]


def test_the_longest_true_prefix_is_taken_and_only_once(hasher: PrefixHash) -> None:
    cache = PrefixCache()
    put(cache, hasher, 0, [1, 2])
    put(cache, hasher, 1, [1, 2, 3])
    put(cache, hasher, 2, [1, 2, 4])
    assert take(cache, hasher, [1, 2, 3, 9]) == 1
    assert take(cache, hasher, [1, 2, 3, 9]) == 0
    assert take(cache, hasher, [1, 2, 3, 9]) is None


def test_a_row_as_long_as_the_prompt_is_of_no_use(hasher: PrefixHash) -> None:
    cache = PrefixCache()
    put(cache, hasher, 0, [1, 2, 3])
    assert take(cache, hasher, [1, 2, 3]) is None


def test_other_images_under_the_same_tokens_do_not_fit(hasher: PrefixHash) -> None:
    cache = PrefixCache()
    put(cache, hasher, 0, [1, 2], places=((1, "a" * 64),))
    assert take(cache, hasher, [1, 2, 3], places=((1, "b" * 64),)) is None
    assert take(cache, hasher, [1, 2, 3], places=((1, "a" * 64), (2, "c" * 64))) == 0


def test_equal_hashes_of_other_tokens_do_not_fit(hasher: PrefixHash) -> None:
    cache = PrefixCache()
    put(cache, hasher, 0, [1, 2])
    TABLE[0, 1] = 7
    assert take(cache, hasher, [1, 2, 3]) is None


def test_the_row_that_waits_longest_is_evicted_first(hasher: PrefixHash) -> None:
    cache = PrefixCache()
    for row in (3, 1, 2):
        put(cache, hasher, row, [row])
    assert [cache.evict() for _ in range(4)] == [3, 1, 2, None]


def test_a_hash_is_extended_by_what_was_said(hasher: PrefixHash) -> None:
    tokens = np.array([5, 6, 7, 8], dtype=np.int32)
    hashes = hasher.prefixes(tokens, [], [])
    assert hasher.extend(int(hashes[1]), tokens[2:], 2) == int(hashes[3])
    assert hasher.extend(int(hashes[1]), tokens[:0], 2) == int(hashes[1])
