from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sightline.media import MediaRef
from sightline.pack import CostModel, MicroBatchWork, assign_to_ranks, build_empty_micro_batch
from sightline.wire import MediaItem
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, PackedItem

BY_TOKEN = CostModel(token=1.0)


def pack_of(num_tokens: int) -> MicroBatch:
    micro_batch = build_empty_micro_batch(1, 3)
    return msgspec.structs.replace(
        micro_batch,
        token_ids=Array.of([0] * num_tokens, "int32"),
        positions=Array.of([[0] * num_tokens] * 3, "int32"),
        subtree_end=Array.of([num_tokens] * num_tokens, "int32"),
        parent=Array.of([-1] * num_tokens, "int32"),
    )


@given(sizes=st.lists(st.integers(1, 50), max_size=12), ranks=st.integers(1, 5))
def test_micro_batches_are_split_evenly_between_ranks(sizes: list[int], ranks: int) -> None:
    packs = [pack_of(size) for size in sizes]
    places = assign_to_ranks(packs, ranks, BY_TOKEN)
    assert len(places) == ranks
    assert len({len(own) for own in places}) == 1
    given_out = [at for own in places for at in own if at is not None]
    assert sorted(given_out) == list(range(len(packs)))
    assert assign_to_ranks(packs, ranks, BY_TOKEN) == places
    loads = [sum(sizes[at] for at in own if at is not None) for own in places]
    # No rank has more than the least loaded one by more than one micro-batch.
    assert max(loads) - min(loads) <= max(sizes, default=0)
    # The number of rounds is minimal, and so is the cost of their costliest micro-batches.
    rounds = [
        [sizes[at] for at in beside if at is not None] for beside in zip(*places, strict=True)
    ]
    falling = sorted(sizes, reverse=True)
    assert [max(beside) for beside in rounds] == falling[::ranks]


def tree_of(ends: list[int]) -> MicroBatch:
    return msgspec.structs.replace(pack_of(len(ends)), subtree_end=Array.of(ends, "int32"))


def test_work_counts_the_pairs_visible_in_the_mask() -> None:
    # A prompt of two tokens with two answers of two tokens, then a separate sequence.
    ends = [6, 6, 4, 4, 6, 6, 8, 8]
    num_pairs = sum(k <= q < ends[k] for q in range(8) for k in range(8))
    assert MicroBatchWork.of(tree_of(ends)) == MicroBatchWork(8, num_pairs, 0, 0, 0)


def test_attention_counts_when_it_costs_more_than_tokens() -> None:
    short = tree_of([end for end in range(4, 36, 4) for _ in range(4)])
    long = tree_of([24] * 24)
    assert MicroBatchWork.of(short).tokens > MicroBatchWork.of(long).tokens
    assert MicroBatchWork.of(short).attended < MicroBatchWork.of(long).attended
    by_tokens = assign_to_ranks([short, long], 2, BY_TOKEN)
    by_pairs = assign_to_ranks([short, long], 2, CostModel(attended=1.0))
    assert by_tokens == [[0], [1]] and by_pairs == [[1], [0]]


def test_image_micro_batches_come_first_and_in_the_same_rounds() -> None:
    item = MediaItem(
        ref=MediaRef("0" * 64, "image/png", 64, 32, 1), family="f", grid=(1, 2, 4), fingerprint="x"
    )
    packed = msgspec.structs.replace(pack_of(2), items=[PackedItem(item, None, "t")])
    packs = [pack_of(90), packed, pack_of(80), packed]
    assert MicroBatchWork.of(packed) == MicroBatchWork(2, 3, 0, 8, 64)
    assert assign_to_ranks(packs, 2, BY_TOKEN) == [[1, 0], [3, 2]]
