"""Bad media costs the samples that show it, is counted, and stops the run above its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import making
import msgspec
import pytest

from sightline.errors import (
    ConfigError,
    FingerprintMismatch,
    MediaError,
    MediaMissing,
    PixelMismatch,
    WireError,
)
from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.distribute import read_shares
from sightline.trainer.feed import BatchPreparer, ReadyBatch, read_announced
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire import Slot
from sightline.wire.control import BatchReady
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.rank_messages import RankAssignment
from sightline.wire.sample import Batch, Sample, digest_batch

LIMIT = PackSize(1 << 20, 1 << 20)


def preparer(model: Path, store: MediaStore, budget: float) -> BatchPreparer:
    family = load_family(model)
    policy = BadMediaPolicy(max_bad_fraction=budget)
    return BatchPreparer(MicroBatchPixels(Materializer(family, store, 1 << 24)), LIMIT, policy)


def with_image(samples: list[Sample]) -> Sample:
    return next(sample for sample in samples if sample.items)


def test_missing_image_drops_only_its_samples(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=8)
    lost = with_image(samples).items[0].ref.digest
    keep = [s for s in samples if all(item.ref.digest != lost for item in s.items)]
    assert 0 < len(keep) < len(samples)
    store.path(lost).unlink()
    ready = preparer(tiny_model, store, budget=1.0).prepare(Batch(1, samples), "")
    assert ready.bad == {"MediaMissing": len(samples) - len(keep)}
    alone = preparer(tiny_model, store, budget=0.0).prepare(Batch(1, keep), "")
    assert [m.batch for m in ready.micro_batches] == [m.batch for m in alone.micro_batches]


def test_pixel_difference_of_one_level_is_refused(tiny_model: Path, store: MediaStore) -> None:
    """The sampler's image has one changed value, so its digest differs."""
    samples = making.samples(tiny_model, store, count=4)
    sample = with_image(samples)
    family = load_family(tiny_model)
    item = sample.items[0]
    patches = family.patches(store.image(item.ref), item).copy()
    patches[0, 0] ^= 1
    from sightline.pixels.pixels import pixel_digest

    digest = pixel_digest(item, patches)
    slots = [Slot(s.offset, s.length, s.item, digest) for s in sample.slots]
    wrong = msgspec.structs.replace(sample, slots=slots)
    ready = preparer(tiny_model, store, budget=1.0).prepare(Batch(1, [wrong]), "")
    assert ready.bad == {"PixelMismatch": 1}


def test_item_with_a_false_size_drops_only_its_samples(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=4)
    true = with_image(samples)
    item = true.items[0]
    ref = msgspec.structs.replace(item.ref, width=item.ref.width + 64)
    grid = (1, item.grid[1], item.grid[2] + 2)
    for lie in (
        msgspec.structs.replace(item, ref=ref),
        msgspec.structs.replace(item, grid=grid),
    ):
        assert lie.key == item.key
        liar = msgspec.structs.replace(true, trace_id="liar", items=[lie, *true.items[1:]])
        ready = preparer(tiny_model, store, budget=0.2).prepare(Batch(1, [*samples, liar]), "")
        assert [lost.sample for lost in ready.dropped] == ["liar"]
        alone = preparer(tiny_model, store, budget=0.0).prepare(Batch(1, samples), "")
        assert [m.batch for m in ready.micro_batches] == [m.batch for m in alone.micro_batches]


def test_images_beyond_the_truncation_are_not_loaded(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=8)
    long = next(s for s in samples if len(s.items) > 1 and s.slots[-1].item == len(s.items) - 1)
    last = long.slots[-1]
    store.path(long.items[last.item].ref.digest).unlink()
    cutting = preparer(tiny_model, store, budget=0.0)
    cutting.max_sequence_tokens = last.offset + 1
    ready = cutting.prepare(Batch(1, [long]), "")
    assert ready.truncated == {"cut": 1} and ready.num_samples == 1 and not ready.dropped


def test_limit_that_cuts_every_sampled_token_is_named(tiny_model: Path, store: MediaStore) -> None:
    cutting = preparer(tiny_model, store, budget=0.0)
    cutting.max_sequence_tokens = 1
    with pytest.raises(ConfigError, match="step 1: .* max_sequence_tokens cuts every sample"):
        cutting.prepare(Batch(1, making.samples(tiny_model, store, count=2)), "")


class Shares:
    """Hands out the shares that it is given, as the channel of a rank does."""

    def __init__(self, *shares: RankAssignment) -> None:
        self._given = shares

    def shares(self) -> Iterator[RankAssignment]:
        return iter(self._given)


def share_reader(model: Path, store: MediaStore, ready: ReadyBatch) -> Iterator[ReadyBatch]:
    family = load_family(model)
    packs: list[MicroBatch | None] = [m.batch for m in ready.micro_batches]
    share = RankAssignment(ready.step, "", packs, [True] * len(packs))
    return read_shares(Shares(share), MicroBatchPixels(Materializer(family, store, 1 << 24)), 3)


def test_image_failing_later_on_a_rank_stops_it_and_is_named(
    tiny_model: Path, store: MediaStore
) -> None:
    samples = making.samples(tiny_model, store, count=4)
    ready = preparer(tiny_model, store, 1.0).prepare(Batch(7, samples), "")
    first = ready.micro_batches[0].batch.items[0]
    store.path(first.item.ref.digest).unlink()
    with pytest.raises(MediaMissing) as caught:
        [own] = share_reader(tiny_model, store, ready)
        list(own.iterate_with_pixels())
    for word in (f"sample {first.wanted_by} of step 7", first.item.ref.digest[:12]):
        assert word in caught.value.problem
    assert str(store.root) in caught.value.problem


def test_different_pixels_on_a_rank_stop_it_even_without_sampler_digests(
    tiny_model: Path, store: MediaStore
) -> None:
    samples = [
        msgspec.structs.replace(s, slots=[Slot(x.offset, x.length, x.item) for x in s.slots])
        for s in making.samples(tiny_model, store, count=4)
    ]
    allowing = replace(
        preparer(tiny_model, store, 0.0), bad_media=BadMediaPolicy(allows_unverified_pixels=True)
    )
    ready = allowing.prepare(Batch(7, samples), "")
    packed = ready.micro_batches[0].batch
    assert all(entry.pixel_digest for entry in packed.items), "rank 0 has digested them"
    changed = [msgspec.structs.replace(packed.items[0], pixel_digest="0" * 32), *packed.items[1:]]
    wrong = msgspec.structs.replace(packed, items=changed)
    share = replace(ready, micro_batches=[replace(ready.micro_batches[0], batch=wrong)])
    with pytest.raises(
        PixelMismatch, match=f"of step 7, image {packed.items[0].item.ref.digest[:12]}"
    ):
        [own] = share_reader(tiny_model, store, share)
        list(own.iterate_with_pixels())


def test_sample_without_pixel_digests_does_not_train_by_default(
    tiny_model: Path, store: MediaStore
) -> None:
    samples = making.samples(tiny_model, store, count=4)
    lost = with_image(samples)
    bare = [Slot(slot.offset, slot.length, slot.item) for slot in lost.slots]
    samples[samples.index(lost)] = msgspec.structs.replace(lost, slots=bare)
    strict = preparer(tiny_model, store, budget=1.0)
    ready = strict.prepare(Batch(1, samples), "")
    assert ready.bad == {"PixelsUnproven": 1} and ready.num_samples == 3
    policy = BadMediaPolicy(allows_unverified_pixels=True)
    ready = replace(strict, bad_media=policy).prepare(Batch(1, samples), "")
    assert ready.bad == {} and ready.num_samples == 4


def test_unreadable_store_ends_the_step_and_drops_no_sample(
    tiny_model: Path, store: MediaStore
) -> None:
    """The fault may be temporary. The batch is then trained in full."""
    samples = making.samples(tiny_model, store, count=4)
    path = store.path(with_image(samples).items[0].ref.digest)
    path.unlink()
    path.mkdir()
    with pytest.raises(MediaError, match="cannot read .* Is a directory") as caught:
        preparer(tiny_model, store, budget=1.0).prepare(Batch(1, samples), "")
    assert "of step 1" in caught.value.problem


def test_run_over_the_bad_media_budget_stops_with_its_cause(
    tiny_model: Path, store: MediaStore
) -> None:
    samples = making.samples(tiny_model, store, count=8)
    store.path(with_image(samples).items[0].ref.digest).unlink()
    with pytest.raises(MediaError, match="max_bad_fraction"):
        preparer(tiny_model, store, budget=0.0).prepare(Batch(1, samples), "")


def test_other_processor_settings_are_refused(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=4)
    family = load_family(tiny_model, max_pixels=4096)
    other = BatchPreparer(
        MicroBatchPixels(Materializer(family, store, 1 << 24)),
        LIMIT,
        BadMediaPolicy(max_bad_fraction=1.0),
    )
    with pytest.raises(FingerprintMismatch):
        other.prepare(Batch(1, samples), "")


def test_the_feed_hands_out_batches_in_order_and_refuses_a_gap(
    tiny_model: Path, store: MediaStore
) -> None:
    batches = []
    for step in (1, 3):
        data = Batch(step, making.samples(tiny_model, store, count=2, seed=step)).to_bytes()
        batches.append(BatchReady(step, digest_batch(data), data))
    announced = iter(batches)
    feed = read_announced(
        lambda: next(announced), preparer(tiny_model, store, 0.0), 1, StallWatchdog()
    )
    assert next(feed).step == 1
    with pytest.raises(ValueError, match="step 3 announced, step 2 is next"):
        next(feed)


def test_unannounced_batch_is_refused(tiny_model: Path, store: MediaStore) -> None:
    """A readable batch with one changed bit in an advantage."""
    [sample] = making.samples(tiny_model, store, count=1)
    data = Batch(1, [sample]).to_bytes()
    at = data.index(sample.advantages.data)
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    assert Batch.from_bytes(damaged) != Batch(1, [sample])
    announced = BatchReady(1, digest_batch(data), damaged)
    feed = read_announced(lambda: announced, preparer(tiny_model, store, 0.0), 1, StallWatchdog())
    with pytest.raises(WireError, match="the batch of step 1 differs from its announced digest"):
        next(feed)
