"""Checks before the forward pass: each kind of misalignment is named."""

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
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
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


def with_slots(packed: MicroBatch, *slots: Slot[int]) -> MicroBatch:
    return msgspec.structs.replace(packed, slots=list(slots))


def test_every_kind_of_misalignment_is_named(
    packed: MicroBatch, tiny_model: Path, store: MediaStore
) -> None:
    check(packed, tiny_model, store)
    family, renderer = load_family(tiny_model), load_renderer(tiny_model, store)
    pad = family.slot_token_ids[0]
    mark = next(i for i in renderer.pad_token_ids if i not in family.slot_token_ids)
    first, *rest = packed.slots
    offset, length, item = first.offset, first.length, first.item
    image = packed.items[item].item.ref.digest[:12]
    trace_id = packed.origins[0].trace_id
    trained = int(packed.trained.numpy()[0])
    for wrong, problem in (
        (with_token(packed, 0, pad), f"step 3, sample {trace_id}, token 0 .* a pad id outside"),
        (with_token(packed, offset, 5), f"a slot over an ordinary token .id 5, image {image}"),
        (with_token(packed, 0, 10**6), "vocabulary"),
        (with_token(packed, trained, mark), "banned token id is to be trained"),
        (with_slots(packed, Slot(offset, length + 1, item), *rest), f"of {length + 1} tokens"),
        (with_slots(packed, first, Slot(offset + 1, length, item)), "over another's"),
        (with_slots(packed, first, Slot(-1, length, item)), "over another's"),
        (with_slots(packed, Slot(len(packed.token_ids) - 1, length, item)), "past the .* tokens"),
        (with_slots(packed, Slot(offset, length, 99)), "a slot names image 99"),
    ):
        with pytest.raises(Misaligned, match=problem):
            check(wrong, tiny_model, store)


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
    with pytest.raises(Misaligned, match=f"{name}.*: {num + 1} features cannot fill {num} pads"):
        check_features(packed, num + 1, family)


@pytest.mark.parametrize("way", ["step", "evaluate"])
def test_the_learner_checks_every_micro_batch_before_its_forward_pass(
    tiny_model: Path, store: MediaStore, way: str
) -> None:
    """The second sample has a pad id in place of a word, which a model would accept."""
    samples = making.samples(tiny_model, store, count=2)
    learner = making.build_learner(
        making.model_config(tiny_model), making.trainer_config(), store, steps=10
    )
    preparer = BatchPreparer(
        MicroBatchPixels(Materializer(learner.family, store, 1 << 24)), PackSize(1, 1)
    )
    ready = preparer.prepare(Batch(1, samples), "")
    first, second = ready.micro_batches
    pad = learner.family.slot_token_ids[0]
    ready.micro_batches[1] = replace(second, batch=with_token(second.batch, 0, pad))
    with pytest.raises(Misaligned, match="a pad id outside every slot"):
        getattr(learner, way)(ready)
