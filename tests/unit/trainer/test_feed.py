"""Bad media costs the samples that show it, is counted, and stops the run past its budget."""

from __future__ import annotations

from pathlib import Path

import making
import msgspec
import pytest

from sightline.errors import FingerprintMismatch, MediaError
from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pack import Cost
from sightline.pixels import Materializer
from sightline.trainer.feed import Feed, Preparer
from sightline.wire.control import Announce
from sightline.wire.sample import Batch, Sample, SampleSlot, digest_of

LIMIT = Cost(1 << 20, 1 << 20)


def preparer(model: Path, store: MediaStore, budget: float) -> Preparer:
    family = load_family(model)
    return Preparer(family, Materializer(family, store, 1 << 24), LIMIT, budget)


def with_image(samples: list[Sample]) -> Sample:
    return next(sample for sample in samples if sample.items)


def test_a_missing_image_costs_exactly_its_samples(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=8)
    lost = with_image(samples).items[0].ref.digest
    keep = [s for s in samples if all(item.ref.digest != lost for item in s.items)]
    assert 0 < len(keep) < len(samples)
    store.path(lost).unlink()
    ready = preparer(tiny_model, store, budget=1.0).prepare(Batch(1, samples), "")
    assert ready.bad == {"MediaMissing": len(samples) - len(keep)}
    alone = preparer(tiny_model, store, budget=0.0).prepare(Batch(1, keep), "")
    assert [m.batch for m in ready.micro_batches] == [m.batch for m in alone.micro_batches]


def test_corrupt_bytes_are_bad_media(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=4)
    path = store.path(with_image(samples).items[0].ref.digest)
    path.chmod(0o644)
    path.write_bytes(b"not what it was")
    ready = preparer(tiny_model, store, budget=1.0).prepare(Batch(1, samples), "")
    assert set(ready.bad) == {"MediaCorrupt"}


def test_one_pixel_by_one_level_is_refused(tiny_model: Path, store: MediaStore) -> None:
    """The sampler saw the image with one value changed: its digest is another."""
    samples = making.samples(tiny_model, store, count=4)
    sample = with_image(samples)
    family = load_family(tiny_model)
    item = sample.items[0]
    patches = family.patches(store.image(item.ref), item).copy()
    patches[0, 0] ^= 1
    from sightline.pixels import pixel_digest

    seen = pixel_digest(item, patches)
    slots = [SampleSlot(s.offset, s.length, s.item, seen) for s in sample.slots]
    wrong = msgspec.structs.replace(sample, slots=slots)
    ready = preparer(tiny_model, store, budget=1.0).prepare(Batch(1, [wrong]), "")
    assert ready.bad == {"PixelMismatch": 1}


def test_past_the_budget_the_run_stops_and_says_why(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=8)
    store.path(with_image(samples).items[0].ref.digest).unlink()
    with pytest.raises(MediaError, match="max_bad_fraction"):
        preparer(tiny_model, store, budget=0.0).prepare(Batch(1, samples), "")


def test_other_processor_settings_are_refused(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=4)
    family = load_family(tiny_model, max_pixels=4096)
    other = Preparer(family, Materializer(family, store, 1 << 24), LIMIT, 1.0)
    with pytest.raises(FingerprintMismatch):
        other.prepare(Batch(1, samples), "")


def test_the_feed_hands_out_batches_in_order_and_refuses_a_gap(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    batches = []
    for step in (1, 3):
        data = Batch(step, making.samples(tiny_model, store, count=2, seed=step)).to_bytes()
        path = tmp_path / f"{step}"
        path.write_bytes(data)
        batches.append(Announce(step, str(path), digest_of(data)))
    announced = iter(batches)
    feed = iter(Feed(lambda: next(announced), preparer(tiny_model, store, 0.0), 1))
    assert next(feed).step == 1
    with pytest.raises(ValueError, match="step 3 announced, step 2 is next"):
        next(feed)
