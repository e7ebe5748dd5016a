"""Messages between processes: keyed, versioned, unknown fields refused, arrays compact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pytest

from sightline.errors import Misaligned, WireError
from sightline.families import load_family
from sightline.media import MediaRef, MediaStore
from sightline.pack import PackSize, pack
from sightline.wire import MediaItem, Slot, control, rank_messages
from sightline.wire.array import Array
from sightline.wire.control import BatchReady
from sightline.wire.file import append_line, read_lines, write_atomic
from sightline.wire.generate import GenerateRequest, MultiModalFeatures, Placeholder, SamplingParams
from sightline.wire.item import check_slots
from sightline.wire.micro_batch import MicroBatch, StepScores
from sightline.wire.sample import Batch, Segment
from sightline.wire.weights import (
    Adapter,
    Manifest,
    WeightFile,
    parse_version_label,
)

REF = MediaRef("ab" * 32, "image/png", 64, 32, 100)
ITEM = MediaItem(REF, "some_family", (1, 2, 4), "f" * 32)


@pytest.mark.parametrize("extra", ["pixel_values", "image", "patches"])
def test_schema_refuses_pixel_data(extra: str) -> None:
    fields = msgspec.to_builtins(ITEM) | {extra: [0.1, 0.2]}
    with pytest.raises(WireError, match="unknown field"):
        MediaItem.from_raw("mmraw:" + msgspec.json.encode(fields).decode())


def request(**features: object) -> GenerateRequest:
    parts: dict[str, object] = {
        "mm_hashes": {"image": [ITEM.key]},
        "mm_placeholders": {"image": [Placeholder(1, 2)]},
        "kwargs_data": {"image": [ITEM.to_raw()]},
        **features,
    }
    return GenerateRequest([1, 2, 2, 3], SamplingParams(), MultiModalFeatures(**parts))  # type: ignore


def test_request_is_self_contained() -> None:
    request = GenerateRequest.of([1, 2, 2, 3], [Slot(1, 2, ITEM)], SamplingParams(max_tokens=3))
    again = msgspec.json.decode(msgspec.json.encode(request), type=GenerateRequest)
    assert again.slots() == [Slot(1, 2, ITEM)]


def test_hash_differing_from_its_items_key_is_refused() -> None:
    with pytest.raises(Misaligned, match=r"mm_hashes.image\[0\]"):
        request(mm_hashes={"image": ["0" * 64]}).slots()


@pytest.mark.parametrize("places", [[(2, 2), (0, 1)], [(0, 2), (1, 2)], [(3, 2)], [(0, 0)]])
def test_unordered_overlapping_or_out_of_range_slots_are_refused(places: list) -> None:
    with pytest.raises(Misaligned, match="slot"):
        check_slots([Slot(offset, length, ITEM) for offset, length in places], 4)


def test_array_is_sent_as_bytes_and_a_wrong_length_is_refused() -> None:
    array = Array.of(np.arange(6).reshape(2, 3), "int32")
    assert len(array.data) == 24 and np.array_equal(array.numpy(), [[0, 1, 2], [3, 4, 5]])
    assert len(msgspec.msgpack.encode(Array.of(np.zeros(1000), "float32"))) < 4100
    with pytest.raises(Misaligned, match="24 bytes"):
        Array("int32", (5,), array.data)
    with pytest.raises(Misaligned, match="dtype"):
        Array("float64", (3,), array.data)


def test_batches_and_micro_batches_round_trip(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=3)
    batch = Batch(4, samples)
    assert Batch.from_bytes(batch.to_bytes()) == batch
    packed = pack(samples, 4, load_family(tiny_model), PackSize(10**6, 10**6))[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=MicroBatch) == packed


def test_unknown_fields_are_refused_everywhere(tiny_model: Path, store: MediaStore) -> None:
    batch = Batch(4, making.samples(tiny_model, store, count=1))
    for struct in (batch, batch.samples[0], ITEM, BatchReady(1, "d", b""), Manifest(1, 1, [])):
        fields = msgspec.to_builtins(struct) | {"surprise": 1}
        with pytest.raises(msgspec.ValidationError, match="surprise"):
            msgspec.convert(fields, type(struct))


def test_recreated_version_has_a_new_label() -> None:
    file = WeightFile("f", 1, "a" * 64)
    assert Manifest(7, 7, [file]).label == "7" and Manifest(7, 7, [file], epoch=2).label == "7.2"
    for epoch, run in ((0, ""), (2, ""), (0, "1f"), (3, "1f")):
        manifest = Manifest(7, 7, [file], epoch=epoch, run=run)
        label = parse_version_label(manifest.label)
        assert label == manifest.policy and (label.version, label.epoch, label.run) == (
            7,
            epoch,
            run,
        )


def test_label_covers_the_run_the_weights_and_the_adapter_base() -> None:
    def label(**changes: Any) -> str:
        files = [WeightFile(name, 1, changes.pop(name, name)) for name in ("a", "b")]
        return Manifest(7, 7, files, run=changes.pop("run", "1f"), **changes).label

    # Manifests of older releases name weights by their files.
    others = [label(a="c"), label(b="c"), label(run="2f"), label(epoch=1)]
    bases = [label(adapter=Adapter(base, "F32", {})) for base in ("x", "y")]
    named = [label(weights_digest=letter * 64) for letter in "ef"]
    assert len({label(), *others, *bases, *named}) == 9
    ways: list[dict[str, Any]] = [{"a": "c"}, {"transport": "broadcast", "payload": {"a": 1}}]
    assert {label(weights_digest="e" * 64, **way) for way in ways} == {named[0]}
    assert label().startswith("7-1f-") and len(label().split("-")[2]) == 16


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "7.", "7-", "7-1f", "7-1f-zz", "7" * 10, "٣", "7\n"]
)
def test_invalid_label_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="not a label of weights"):
        parse_version_label(text)


def test_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, b"one")
    append_line(path, b"two")
    with open(path, "ab") as file:
        file.write(b"thr")
    assert read_lines(path) == [b"one", b"two"]


def test_undecodable_bytes_are_a_wire_error(tiny_model: Path, store: MediaStore) -> None:
    batch = Batch(4, making.samples(tiny_model, store, count=1))
    surprise = msgspec.msgpack.encode(msgspec.to_builtins(batch) | {"surprise": 1})
    for decode in (Batch.from_bytes, StepScores.from_bytes, control.decode, rank_messages.decode):
        for data in (b"", b"\xc1", batch.to_bytes()[:-1], surprise):
            with pytest.raises(WireError, match="same version of sightline"):
                decode(data)


def test_a_struct_of_another_schema_is_refused(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=2)
    for struct in (Batch(4, samples), samples[0], Manifest(1, 1, []), ITEM):
        with pytest.raises(WireError, match="schema 9, this is"):
            msgspec.structs.replace(struct, schema=9)


def test_slot_round_trips_and_its_digest_is_optional() -> None:
    place = {"offset": 1, "length": 2}
    assert msgspec.convert({**place, "item": 3}, Slot[int]) == Slot(1, 2, 3)
    assert msgspec.convert({**place, "item": 3, "pixel_digest": None}, Slot[int]) == Slot(1, 2, 3)
    assert msgspec.to_builtins(Slot(1, 2, 3)) == {**place, "item": 3}
    assert Slot(1, 2, 3, "d").shift(4) == Slot(5, 2, 3, "d")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**place, "item": 3}, Slot[MediaItem])


def test_samples_with_misaligned_trained_tokens_are_refused(
    tiny_model: Path, store: MediaStore
) -> None:
    [sample] = making.samples(tiny_model, store, count=1)
    trained = sample.trained.numpy()
    for changes, problem in (
        ({"trained": Array.of(trained[::-1], "int32")}, "segments do not cover"),
        ({"segments": sample.segments[:-1]}, "segments do not cover"),
        ({"advantages": Array.of(trained * np.nan, "float32")}, "not finite"),
        ({"logprobs": Array.of(trained[1:], "float32")}, "trained tokens have"),
        ({"slots": [*sample.slots, Slot(0, 1, 0)]}, r"slots\[\d+\]"),
        ({"slots": [Slot(0, 1, 99)]}, "item 99"),
    ):
        with pytest.raises(Misaligned, match=problem):
            msgspec.structs.replace(sample, **changes)
    num, end = len(trained), len(sample.token_ids)
    for starts in ([0], [end - num + 1], [1, 1]):  # the first token, one beyond the last, twice
        size = num // len(starts)
        segments = [Segment(start, start + size, node=0) for start in starts]
        places = np.concatenate([np.arange(s.start, s.stop) for s in segments])
        arrays = {
            name: Array.of(getattr(sample, name).numpy()[: len(places)], dtype)
            for name, dtype in (("logprobs", "float32"), ("versions", "int32"))
        }
        arrays |= {"advantages": None, "trained": Array.of(places, "int32")}
        with pytest.raises(Misaligned, match="ascending"):
            msgspec.structs.replace(sample, segments=segments, **arrays)


def test_misaligned_micro_batches_are_refused(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=2)
    [packed] = pack(samples, 4, load_family(tiny_model), PackSize(10**6, 10**6))
    arrays = {name: getattr(packed, name) for name in MicroBatch.__struct_fields__}
    arrays = {name: array for name, array in arrays.items() if isinstance(array, Array)}
    assert len(arrays) == 9
    for name in arrays.keys() - {"token_ids", "trained"}:
        shorter = Array.of(arrays[name].numpy()[..., 1:], arrays[name].dtype)
        with pytest.raises(Misaligned, match=f"step 4: {name} do not line up"):
            msgspec.structs.replace(packed, **{name: shorter})
    first = np.where(packed.trained.numpy() == packed.trained.numpy()[0], 0, packed.trained.numpy())
    with pytest.raises(Misaligned, match="a trained token has no parent"):
        msgspec.structs.replace(packed, trained=Array.of(first, "int32"))


def test_failed_atomic_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        write_atomic(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(Misaligned, match="one entry per slot"):
        request(kwargs_data={"image": []}).slots()
