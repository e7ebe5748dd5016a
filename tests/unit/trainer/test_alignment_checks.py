"""Tripwires: each kind of misalignment is named before the forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import making
import msgspec
import numpy as np
import pytest

from sightline.errors import Misaligned
from sightline.families import load_family, load_renderer
from sightline.media import MediaStore
from sightline.pack import PackSize, pack
from sightline.pixels import Materializer
from sightline.trainer.alignment_checks import check_features, check_micro_batch, check_patches
from sightline.trainer.feed import BatchPreparer
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.sample import Batch


@pytest.fixture
def packed(tiny_model: Path, store: MediaStore) -> MicroBatch:
    samples = making.samples(tiny_model, store, count=4)
    return pack(samples, 3, load_family(tiny_model), PackSize(1 << 20, 1 << 20))[0]


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
    first = packed.origins[0].trace_id
    with pytest.raises(Misaligned, match="a pad id outside every slot") as caught:
        check(with_token(packed, 0, pad), tiny_model, store)
    num = sum(slot.length for slot in packed.slots)
    for word in (f"step 3, sample {first}, token 0", f"{num + 1} pads, {num} slot tokens"):
        assert word in caught.value.problem


def test_every_token_is_known_by_its_sample(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=4)
    [packed] = pack(samples, 3, load_family(tiny_model), PackSize(1 << 20, 1 << 20))
    pad = load_family(tiny_model).slot_token_ids[0]
    at = 0
    for sample in sorted(samples, key=lambda s: -len(s.token_ids)):
        for place in (at, at + len(sample.token_ids) - 1):
            with pytest.raises(Misaligned, match=f"sample {sample.trace_id}, token {place} "):
                check(with_token(packed, place, pad), tiny_model, store)
        at += len(sample.token_ids)


def test_a_slot_over_an_ordinary_token_is_named(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    slot = packed.slots[0]
    image = packed.items[slot.item].item.ref.digest[:12]
    with pytest.raises(Misaligned, match=f"a slot over an ordinary token .id 5, image {image}"):
        check(with_token(packed, slot.offset, 5), tiny_model, store)


def test_a_slot_of_the_wrong_length_names_image_and_counts(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    first = packed.slots[0]
    longer = [Slot(first.offset, first.length + 1, first.item), *packed.slots[1:]]
    with pytest.raises(Misaligned, match=f"slot of {first.length + 1} tokens"):
        check(msgspec.structs.replace(packed, slots=longer), tiny_model, store)


def test_slots_past_the_end_or_over_one_another_or_of_no_image_are_named(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    first = packed.slots[0]
    for wrong in (
        Slot(len(packed.token_ids) - 1, first.length, first.item),
        Slot(first.offset + 1, first.length, first.item),
        Slot(-1, first.length, first.item),
    ):
        with pytest.raises(Misaligned, match="past the .* tokens or over another's"):
            check(msgspec.structs.replace(packed, slots=[first, wrong]), tiny_model, store)
    none = Slot(first.offset, first.length, 99)
    with pytest.raises(Misaligned, match="a slot of image 99"):
        check(msgspec.structs.replace(packed, slots=[none]), tiny_model, store)


def test_patches_and_features_are_counted_against_grids_and_pads(
    packed: MicroBatch, tiny_model: Path
) -> None:
    family = load_family(tiny_model)
    patches = np.zeros((packed.num_patches, 4), dtype=np.uint8)
    check_patches(packed, patches)
    num = sum(family.num_tokens(entry.item) for entry in packed.items)
    check_features(packed, num, family)
    name = f"{packed.items[0].item.ref.digest[:12]} of sample {packed.items[0].wanted_by}"
    for wrong in (patches[1:], None):
        with pytest.raises(Misaligned, match=f"step 3, image {name}.* patches were made"):
            check_patches(packed, wrong)
    with pytest.raises(Misaligned, match=f"{name}.*: {num + 1} features for {num} visual tokens"):
        check_features(packed, num + 1, family)


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


@pytest.mark.parametrize("way", ["step", "evaluate"])
def test_the_learner_checks_every_micro_batch_before_its_forward_pass(
    tiny_model: Path, store: MediaStore, way: str
) -> None:
    """The second of two has a pad id in place of a word, which a model would accept."""
    samples = making.samples(tiny_model, store, count=2)
    learner = making.build_learner(
        making.model_config(tiny_model), making.trainer_config(), store, steps=10
    )
    preparer = BatchPreparer(
        learner.family, Materializer(learner.family, store, 1 << 24), PackSize(1, 1)
    )
    ready = preparer.prepare(Batch(1, samples), "")
    first, second = ready.micro_batches
    pad = learner.family.slot_token_ids[0]
    ready.micro_batches[1] = replace(second, batch=with_token(second.batch, 0, pad))
    with pytest.raises(Misaligned, match="a pad id outside every slot"):
        getattr(learner, way)(ready)
