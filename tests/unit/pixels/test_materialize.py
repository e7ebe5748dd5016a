"""Pixels: one computation per key, bounded memory, uncached failures, digests."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import making
import msgspec
import numpy as np
import pytest

from sightline.errors import MediaMissing
from sightline.families import Family, load_family
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.pixels.pixels import pixel_digest


@pytest.fixture
def family(tiny_model: Path) -> Family:
    return load_family(tiny_model)


def test_concurrent_requests_share_one_computation(family: Family, store: MediaStore) -> None:
    gate = threading.Event()

    class Slow(MediaStore):
        def image(self, ref):  # type: ignore[no-untyped-def]
            gate.wait(5)
            return super().image(ref)

    slow = Slow(store.root)
    item = family.item(store.put(making.image(random.Random(0))))
    materializer = Materializer(family, slow, max_bytes=1 << 20, threads=2)
    flights = [materializer.submit(item) for _ in range(10)]
    gate.set()
    assert len({flight.result(5).digest for flight in flights}) == 1
    assert materializer.counts.made == 1 and materializer.counts.joined == 9
    materializer.get(item)
    assert materializer.counts.hits == 1
    materializer.close()


def test_cache_stays_within_its_byte_limit(family: Family, store: MediaStore) -> None:
    rng = random.Random(1)
    items = [family.item(store.put(making.image(rng, 64, 64))) for _ in range(6)]
    image_bytes = family.patches(store.image(items[0].ref), items[0]).nbytes
    materializer = Materializer(family, store, max_bytes=2 * image_bytes)
    for item in items:
        materializer.get(item)
    assert materializer.counts.bytes_held <= 2 * image_bytes and materializer.counts.evicted == 4
    big = family.item(store.put(making.image(rng, 256, 256)))
    materializer.get(big)
    assert materializer.counts.bytes_held <= 2 * image_bytes
    materializer.close()


def test_warmed_up_pool_has_all_its_threads(family: Family, store: MediaStore) -> None:
    def pool() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("pixels")}

    materializer, before = Materializer(family, store, 0, threads=3), pool()
    materializer.warm_up()
    assert len(pool() - before) == 3
    assert materializer.counts.made == 0
    materializer.close()


def test_failure_is_not_cached(family: Family, store: MediaStore) -> None:
    data = making.image(random.Random(3))
    ref = store.put(data)
    path = store.path(ref.digest)
    original = path.read_bytes()
    path.unlink()
    materializer = Materializer(family, store, 1 << 20)
    with pytest.raises(MediaMissing):
        materializer.get(family.item(ref))
    path.write_bytes(original)
    assert materializer.get(family.item(ref)).digest
    assert materializer.counts.failed == 1
    materializer.close()


def test_digest_covers_pixels_grid_and_settings(
    family: Family, tiny_model: Path, store: MediaStore
) -> None:
    item = family.item(store.put(making.image(random.Random(4), 64, 96)))
    patches = family.patches(store.image(item.ref), item)
    digest = pixel_digest(item, patches)
    turned = msgspec.structs.replace(item, grid=(item.grid[0], item.grid[2], item.grid[1]))
    assert turned.grid != item.grid and pixel_digest(turned, patches) != digest
    changed = patches.copy()
    changed[-1, -1] ^= 1
    assert pixel_digest(item, changed) != digest
    other = load_family(tiny_model, max_pixels=1 << 20).item(item.ref)
    assert other.grid == item.grid and pixel_digest(other, patches) != digest
    assert np.array_equal(patches, family.patches(store.image(item.ref), item))
