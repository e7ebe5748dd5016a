"""Tripwires: each kind of misalignment is named before the forward pass."""

from __future__ import annotations

from pathlib import Path

import making
import msgspec
import pytest

from sightline.errors import Misaligned
from sightline.families import load_family, load_renderer
from sightline.media import MediaStore
from sightline.pack import Cost, pack
from sightline.trainer.checks import check_micro_batch
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, PackedSlot


@pytest.fixture
def packed(tiny_model: Path, store: MediaStore) -> MicroBatch:
    samples = making.samples(tiny_model, store, count=4)
    return pack(samples, 3, load_family(tiny_model), Cost(1 << 20, 1 << 20))[0]


def check(packed: MicroBatch, model: Path, store: MediaStore) -> None:
    renderer = load_renderer(model, store)
    check_micro_batch(packed, load_family(model), renderer.pad_token_ids, renderer.vocab_size)


def with_token(packed: MicroBatch, at: int, token: int) -> MicroBatch:
    ids = packed.token_ids.numpy().copy()
    ids[at] = token
    return msgspec.structs.replace(packed, token_ids=Array.of(ids, "int32"))


def test_a_whole_micro_batch_passes(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    check(packed, tiny_model, store)


def test_a_stray_pad_is_named_with_its_place(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    pad = load_family(tiny_model).slot_token_ids[0]
    with pytest.raises(Misaligned, match="a pad id outside every slot at token 0"):
        check(with_token(packed, 0, pad), tiny_model, store)


def test_a_slot_over_an_ordinary_token_is_named(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    with pytest.raises(Misaligned, match="a slot over an ordinary token"):
        check(with_token(packed, packed.slots[0].offset, 5), tiny_model, store)


def test_a_slot_of_the_wrong_length_names_image_and_counts(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    first = packed.slots[0]
    longer = [PackedSlot(first.offset, first.length + 1, first.item), *packed.slots[1:]]
    with pytest.raises(Misaligned, match=f"slot of {first.length + 1} tokens"):
        check(msgspec.structs.replace(packed, slots=longer), tiny_model, store)


def test_an_id_outside_the_vocabulary_is_named(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    with pytest.raises(Misaligned, match="vocabulary"):
        check(with_token(packed, 0, 10**6), tiny_model, store)


def test_a_banned_id_that_is_to_train_is_named(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    renderer = load_renderer(tiny_model, store)
    family = load_family(tiny_model)
    mark = next(i for i in renderer.pad_token_ids if i not in family.slot_token_ids)
    trained = int(packed.trained.numpy()[0])
    with pytest.raises(Misaligned, match="banned token id is to be trained"):
        check(with_token(packed, trained, mark), tiny_model, store)


def test_arrays_that_do_not_line_up_cannot_be_built(packed: MicroBatch) -> None:
    with pytest.raises(Misaligned, match="subtree_end"):
        msgspec.structs.replace(packed, subtree_end=Array.of([1, 2], "int32"))
