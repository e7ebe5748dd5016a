from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sightline.pack import empty_micro_batch, spread
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.share import Share, decode, encode


def pack_of(num_tokens: int) -> MicroBatch:
    one = empty_micro_batch(1, 3)
    return msgspec.structs.replace(
        one,
        token_ids=Array.of([0] * num_tokens, "int32"),
        positions=Array.of([[0] * num_tokens] * 3, "int32"),
        subtree_end=Array.of([num_tokens] * num_tokens, "int32"),
        parent=Array.of([-1] * num_tokens, "int32"),
    )


@given(sizes=st.lists(st.integers(1, 50), max_size=12), ranks=st.integers(1, 5))
def test_every_micro_batch_goes_to_one_rank_and_all_have_as_many(
    sizes: list[int], ranks: int
) -> None:
    packs = [pack_of(size) for size in sizes]
    places = spread(packs, ranks)
    assert len(places) == ranks
    assert len({len(own) for own in places}) == 1
    given_out = [at for own in places for at in own if at is not None]
    assert sorted(given_out) == list(range(len(packs)))
    assert spread(packs, ranks) == places
    loads = [sum(sizes[at] for at in own if at is not None) for own in places]
    # No rank has more than the least loaded one by more than one micro-batch.
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_share_survives_the_wire() -> None:
    share = Share(step=3, digest="d", micro_batches=[pack_of(4), None], shows=[True, False])
    assert decode(encode(share)) == share


def test_an_empty_micro_batch_trains_nothing() -> None:
    empty = empty_micro_batch(7, 3)
    assert empty.step == 7 and not len(empty.trained) and not empty.items
