"""Cached rows are found only by their tokens and images."""

from __future__ import annotations

import numpy as np

from sightline.inference.torch_engine.prefix_cache import CachedPrefix, PrefixCache

TABLE = np.zeros((8, 32), dtype=np.int32)


def put(
    cache: PrefixCache,
    row: int,
    tokens: list[int],
    places: tuple[tuple[int, str], ...] = (),
) -> None:
    TABLE[row, : len(tokens)] = tokens
    cache[row] = CachedPrefix(len(tokens), places, {})


def take(
    cache: PrefixCache,
    tokens: list[int],
    places: tuple[tuple[int, str], ...] = (),
) -> int | None:
    row = cache.take(np.array(tokens, dtype=np.int32), places, TABLE)
    return None if row is None else row[0]


def test_longest_proper_prefix_is_taken_once() -> None:
    cache = PrefixCache()
    put(cache, 0, [1, 2])
    put(cache, 1, [1, 2, 3])
    put(cache, 2, [1, 2, 4])
    assert take(cache, [1, 2, 3, 9]) == 1
    assert take(cache, [1, 2, 3, 9]) == 0
    assert take(cache, [1, 2, 3, 9]) is None


def test_row_as_long_as_the_prompt_is_not_reused() -> None:
    cache = PrefixCache()
    put(cache, 0, [1, 2, 3])
    assert take(cache, [1, 2, 3]) is None


def test_same_tokens_with_other_images_do_not_match() -> None:
    cache = PrefixCache()
    put(cache, 0, [1, 2], places=((1, "a" * 64),))
    assert take(cache, [1, 2, 3], places=((1, "b" * 64),)) is None
    assert take(cache, [1, 2, 3], places=((1, "a" * 64), (2, "c" * 64))) == 0


def test_different_tokens_do_not_match_at_any_position() -> None:
    cache = PrefixCache()
    for tokens in ([7, 2, 3], [1, 7, 3], [1, 2, 7]):
        put(cache, 0, tokens)
        assert take(cache, [1, 2, 3, 4]) is None


def test_oldest_row_is_evicted_first() -> None:
    cache = PrefixCache()
    for row in (3, 1, 2):
        put(cache, row, [row])
    assert [cache.evict() for _ in range(4)] == [3, 1, 2, None]
