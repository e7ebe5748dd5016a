"""Guarantees of every family, on every checkpoint of conftest.

1. A layout needs only an image's size, and its grid equals that of transformers' processor.
2. Patches are uint8 and contain each pixel once. Equal images, and only those, have equal patches.
3. An item with other settings or a wrong grid is refused.
4. Positions continue after the previous ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shards import num_examples

from sightline import FamilyError, FingerprintMismatch, MediaRefused, Misaligned
from sightline.families import load_family, load_renderer
from sightline.families.registry import family_names
from sightline.wire import Slot

thousand = settings(max_examples=num_examples(1000, 60), deadline=None)
many = settings(max_examples=num_examples(200, 30), deadline=None)
sides = st.integers(1, 3000)


@thousand
@given(width=sides, height=sides)
def test_layout_counts_patches_like_transformers(seeing: Any, width: int, height: int) -> None:
    try:
        layout = seeing.family.layout(width, height)
    except MediaRefused as error:
        assert f"{width}x{height}" in error.problem
        with pytest.raises(ValueError):
            seeing.transformers_images.get_number_of_image_patches(height, width)
        return
    patches = seeing.transformers_images.get_number_of_image_patches(height, width)
    assert math.prod(layout.grid) == patches
    assert layout.num_tokens == seeing.num_slot_tokens(height, width)


def test_family_name_equals_its_folder_name(checkpoint: Any) -> None:
    assert checkpoint.family.name in family_names()


def test_items_match_the_layout(seeing: Any) -> None:
    family = seeing.family
    for ref in seeing.refs:
        item = family.item(ref)
        layout = family.layout(ref.width, ref.height)
        assert item.ref == ref
        assert item.grid == layout.grid
        assert item.family == family.name
        assert family.num_tokens(item) == layout.num_tokens
        family.check_item(item)


def test_item_is_built_once_per_image(seeing: Any) -> None:
    ref = seeing.refs[0]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=type(ref))
    assert seeing.family.item(again) is seeing.family.item(ref)


def test_patches_are_bytes_with_one_row_per_grid_cell(seeing: Any) -> None:
    family = seeing.family
    for ref in seeing.refs:
        item = family.item(ref)
        patches = family.patches(seeing.store.image(ref), item)
        assert patches.dtype == np.uint8
        assert patches.flags.c_contiguous
        assert patches.ndim == 2
        assert len(patches) == math.prod(item.grid)


def test_patches_hold_each_pixel_once(seeing: Any) -> None:
    sizes = []
    for ref in seeing.refs:
        layout = seeing.family.layout(ref.width, ref.height)
        patches = seeing.family.patches(seeing.store.image(ref), seeing.family.item(ref))
        values = patches.size / seeing.case.value_bytes
        sizes.append(values / (3 * layout.height * layout.width))
    # Padding enlarges small images, and a repeated frame doubles all of them.
    assert 1 <= min(sizes) < 2


def test_patches_are_equal_only_for_equal_pixels(seeing: Any) -> None:
    for ref in seeing.refs:
        item, image = seeing.family.item(ref), seeing.store.image(ref)
        patches = seeing.family.patches(image, item)
        assert np.array_equal(patches, seeing.family.patches(seeing.store.image(ref), item))
        darker = image.point(lambda value: value // 2)
        assert not np.array_equal(patches, seeing.family.patches(darker, item))


def test_patches_differing_in_size_from_the_ref_are_refused(seeing: Any) -> None:
    item = seeing.family.item(seeing.refs[1])
    ref = item.ref
    turned = Image.new("RGB", (ref.height, ref.width))
    with pytest.raises(Misaligned, match=ref.digest[:12]):
        seeing.family.patches(turned, item)


def test_the_fingerprint_names_every_setting(seeing: Any) -> None:
    same = load_family(seeing.path)
    assert same.fingerprint == seeing.family.fingerprint
    assert same.settings["family"] == same.name
    prints = {same.fingerprint}
    for key, value in seeing.case.overrides:
        other = load_family(seeing.path, **{key: value})
        assert other.settings[key] == value
        prints.add(other.fingerprint)
    assert len(prints) == 1 + len(seeing.case.overrides)


def test_item_with_other_settings_is_refused_naming_both(seeing: Any, editable: Path) -> None:
    if seeing.case.overrides:
        key, value = seeing.case.overrides[0]
        other = load_family(seeing.path, **{key: value})
    else:
        key, file = "rescale_factor", editable / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: 1 / 128}))
        other = load_family(editable)
    item = other.item(seeing.refs[0])
    with pytest.raises(FingerprintMismatch) as caught:
        seeing.family.check_item(item)
    assert other.fingerprint in caught.value.problem
    assert seeing.family.fingerprint in caught.value.problem
    assert key in caught.value.problem
    foreign = msgspec.structs.replace(seeing.family.item(seeing.refs[0]), family="other")
    with pytest.raises(FingerprintMismatch, match="other"):
        seeing.family.check_item(foreign)


def test_an_item_with_a_wrong_grid_is_refused(seeing: Any) -> None:
    item = seeing.family.item(seeing.refs[0])
    t, h, w = item.grid
    with pytest.raises(Misaligned, match="grid"):
        seeing.family.check_item(msgspec.structs.replace(item, grid=(t, 2 * h, w)))


def test_invalid_settings_are_refused_at_load(seeing: Any) -> None:
    with pytest.raises(FamilyError, match="max_pixels"):
        load_family(seeing.path, min_pixels=4096, max_pixels=1024)
    with pytest.raises(FamilyError, match="sharpness"):
        load_family(seeing.path, sharpness=3)


@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json"])
def test_missing_checkpoint_file_is_refused_by_name(seeing: Any, editable: Path, name: str) -> None:
    (editable / name).unlink()
    with pytest.raises(FamilyError, match=name):
        load_renderer(editable, seeing.store)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A number of tokens after the last image, and images: (text before it, which size)."""
    images = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=4)
    return draw(st.integers(0, 9)), draw(images)


def place(seeing: Any, layout: tuple[int, list[tuple[int, int]]]) -> tuple[int, list[Any]]:
    tail, images = layout
    slots, offset = [], 0
    for text, which in images:
        item = seeing.family.item(seeing.refs[which])
        length = seeing.family.num_tokens(item)
        slots.append(Slot(offset + text, length, item))
        offset += text + length
    return offset + tail, slots


@many
@given(first=layouts(), second=layouts())
def test_positions_continue_after_the_previous_span(seeing: Any, first: Any, second: Any) -> None:
    family = seeing.family
    num_first, slots_first = place(seeing, first)
    num_second, slots_second = place(seeing, second)
    head, middle = family.positions(num_first, slots_first)
    tail, num_positions = family.positions(num_second, slots_second)
    moved = [slot.shift(num_first) for slot in slots_second]
    whole, whole_end = family.positions(num_first + num_second, slots_first + moved)
    assert whole.dtype == np.int32
    assert whole.shape == (family.num_axes, num_first + num_second)
    assert np.array_equal(whole, np.concatenate([head, middle + tail], axis=1))
    assert whole_end == middle + num_positions


def test_text_advances_every_axis_by_one(seeing: Any) -> None:
    positions, end = seeing.family.positions(7, [])
    assert np.array_equal(positions, np.tile(np.arange(7), (seeing.family.num_axes, 1)))
    assert end == 7


@pytest.mark.parametrize("change", ["length", "overlap", "outside"])
def test_positions_refuse_mismatched_slots(seeing: Any, change: str) -> None:
    num_tokens, (first, second) = place(seeing, (0, [(1, 0), (1, 1)]))
    broken = {
        "length": Slot(second.offset, second.length - 1, second.item),
        "overlap": Slot(first.offset, second.length, second.item),
        "outside": Slot(num_tokens, second.length, second.item),
    }[change]
    with pytest.raises(Misaligned):
        seeing.family.positions(num_tokens, [first, broken])


def test_family_can_be_sent_to_another_process(seeing: Any) -> None:
    again = pickle.loads(pickle.dumps(seeing.family))
    assert again.fingerprint == seeing.family.fingerprint
    assert again.item(seeing.refs[0]) == seeing.family.item(seeing.refs[0])


PATCHES_PROGRAM = """
import hashlib, sys
from sightline import MediaStore, load_family
model, root, digest = sys.argv[1:]
store, family = MediaStore(root), load_family(model)
ref = store.get_ref(digest)
patches = family.patches(store.image(ref), family.item(ref))
print(hashlib.sha256(patches.tobytes()).hexdigest())
heavy = {"torch", "transformers", "torchvision"} & set(sys.modules)
assert not heavy, heavy
"""


def test_pixels_do_not_depend_on_torchvision(making_pixels: Any, tmp_path: Path) -> None:
    # This torchvision can be found but not imported: any use of it fails.
    fake = tmp_path / "torchvision"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('operator torchvision::nms missing')")
    ref = making_pixels.refs[2]
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PATCHES_PROGRAM}"
    words = [
        sys.executable,
        "-c",
        program,
        str(making_pixels.path),
        making_pixels.store.root,
        ref.digest,
    ]
    with_it = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    patches = making_pixels.family.patches(
        making_pixels.store.image(ref), making_pixels.family.item(ref)
    )
    assert with_it == hashlib.sha256(patches.tobytes()).hexdigest()
