"""A batch over two ranks, over real sockets: which rank computes which pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import making
import msgspec

from sightline.families import load_family
from sightline.launch.processes import reserve_port
from sightline.media import MediaStore
from sightline.pack import CostModel, PackSize
from sightline.pixels import Materializer
from sightline.trainer.distribute import iterate_shares, read_shares
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.ranks import FollowerChannel, LeadChannel, RankInfo
from sightline.wire.sample import Batch


@contextmanager
def two_ranks() -> Iterator[tuple[LeadChannel, FollowerChannel]]:
    channel = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}"
    lead = LeadChannel(RankInfo(0, 2, "", channel, "s"))
    follow = FollowerChannel(RankInfo(1, 2, "", channel, "s"))
    yield lead, follow
    follow.close(), lead.close()


def test_each_rank_processes_the_images_of_its_share(tiny_model: Path, store: MediaStore) -> None:
    family = load_family(tiny_model)
    first, second = Materializer(family, store, 1 << 24), Materializer(family, store, 1 << 24)
    batch = Batch(1, making.samples(tiny_model, store, count=8))
    ready = BatchPreparer(MicroBatchPixels(first), PackSize(160, 4096)).prepare(batch, "digest")
    num_items = len({item.key for sample in batch.samples for item in sample.items})
    with two_ranks() as (lead, follow):
        follow.report_ready()
        lead.wait_until_loaded(timeout_s=30)
        dims, price = ParallelDims(data=2), CostModel(token=1.0)
        [mine] = iterate_shares([ready], lead, dims, price)
        [theirs] = read_shares(follow, MicroBatchPixels(second), family.num_axes)
    needed = {entry.item.key for m in theirs.micro_batches for entry in m.batch.items}
    assert second.counts.made == 0, "none is made before its micro-batch comes"
    # The result is bit-identical, whichever rank computes the pixels.
    assert _bits(mine, theirs) == _bits(ready)
    assert first.counts.made == num_items and needed
    assert second.counts.made == len(needed)
    first.close(), second.close()


def test_other_ranks_only_evaluate_held_out_batches(tiny_model: Path, store: MediaStore) -> None:
    family = load_family(tiny_model)
    pixels = MicroBatchPixels(Materializer(family, store, 1 << 24))
    batch = Batch(0, making.samples(tiny_model, store, count=4))
    ready = BatchPreparer(pixels, PackSize(160, 4096)).prepare(batch, "")
    with two_ranks() as (lead, follow):
        follow.report_ready()
        lead.wait_until_loaded(timeout_s=30)
        dims, price = ParallelDims(data=2), CostModel(token=1.0)
        [mine] = iterate_shares([replace(ready, held_out=True)], lead, dims, price)
        [theirs] = read_shares(follow, pixels, family.num_axes)
    assert mine.held_out and theirs.held_out
    pixels.materializer.close()


def _bits(*batches: ReadyBatch) -> list[tuple[bytes, bytes]]:
    """Return the bytes of every micro-batch and its pixels, sorted, without empty ones."""
    return sorted(
        (
            msgspec.msgpack.encode(micro_batch.batch),
            b"" if micro_batch.made is None else micro_batch.made.tobytes(),
        )
        for batch in batches
        for micro_batch in batch.with_pixels().micro_batches
        if len(micro_batch.batch.trained)
    )
