"""Layout and pixels of Qwen-VL against transformers' Pillow image processor, bit for bit.

The rule for what the processor does not decide: an image is turned upright by its EXIF
orientation when it is decoded, and alpha is dropped, as `image.convert("RGB")` drops it.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from shards import num_examples

from sightline import MediaRef, MediaRefused, MediaStore
from sightline.families.processor_settings import FrameSettings
from sightline.families.qwen_vl.vision import QwenVLFamily

HALF = (0.5, 0.5, 0.5)
QWEN3_VL = FrameSettings(patch=16, min_pixels=65536, max_pixels=16777216, mean=HALF, std=HALF)
QWEN2_5_VL = FrameSettings(patch=14, min_pixels=3136, max_pixels=12845056)
TINY = FrameSettings(patch=16, min_pixels=1024, max_pixels=4096 * 1024, mean=HALF, std=HALF)
ALL = {"qwen3_vl": QWEN3_VL, "qwen2_5_vl": QWEN2_5_VL, "tiny": TINY}


def processor(settings: FrameSettings) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=settings.patch,
        merge_size=settings.merge,
        temporal_patch_size=settings.temporal,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )


@pytest.fixture
def store(tmp_path: Any) -> MediaStore:
    return MediaStore(tmp_path)


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise over a gradient: every value of every channel, and something for the filter to do."""
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 255, width)[None, :, None]
    y = np.linspace(255, 0, height)[:, None, None]
    noise = rng.integers(0, 96, (height, width, 4))
    values = (0.4 * x + 0.3 * y + noise).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(values, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def check_equal(family: QwenVLFamily, store: MediaStore, source: Any, image: Image.Image) -> None:
    """Check that our pixels of the stored source equal transformers' pixels of `shown`."""
    ref = store.put(source)
    check_image(family, ref, store.image(ref), image)


def check_image(
    family: QwenVLFamily, ref: MediaRef, image: Image.Image, shown: Image.Image
) -> None:
    item = family.item(ref)
    patches = family.patches(image, item)
    want = processor(family._settings)(shown, return_tensors="np")
    assert tuple(want["image_grid_thw"][0]) == item.grid
    assert patches.shape == (len(want["pixel_values"]), 3 * family.patch**2)
    rows = family.rows(patches)
    assert rows.dtype == want["pixel_values"].dtype == np.float32
    assert np.array_equal(rows, want["pixel_values"])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("width", "height"),
    [(8, 8), (32, 32), (33, 31), (47, 48), (8, 400), (1000, 9), (199, 1), (640, 480), (1280, 720)],
)
def test_rows_are_bit_identical_to_transformers(
    store: MediaStore, name: str, width: int, height: int
) -> None:
    image = picture(width, height)
    check_equal(QwenVLFamily(ALL[name]), store, image, image)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("P", "GIF"), ("RGBA", "WEBP")],
)
def test_rows_of_encoded_files_are_bit_identical(store: MediaStore, mode: str, kind: str) -> None:
    out = io.BytesIO()
    picture(97, 130, mode).save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    data = out.getvalue()
    check_equal(QwenVLFamily(QWEN3_VL), store, data, Image.open(io.BytesIO(data)))


def test_transparent_palette_is_resolved_and_alpha_dropped(store: MediaStore) -> None:
    out = io.BytesIO()
    picture(64, 64, "P").save(out, "PNG", transparency=3)
    plain = Image.open(io.BytesIO(out.getvalue()))
    del plain.info["transparency"]
    check_equal(QwenVLFamily(QWEN3_VL), store, out.getvalue(), plain.convert("RGB"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotated_photo_is_turned_upright(store: MediaStore, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    picture(120, 70).save(out, "JPEG", exif=exif, quality=90)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(out.getvalue())))
    check_equal(QwenVLFamily(QWEN3_VL), store, out.getvalue(), upright)
    ref = store.put(out.getvalue())
    assert (ref.width, ref.height) == upright.size


def test_normalization_table_matches_transformers() -> None:
    family = QwenVLFamily(QWEN2_5_VL)
    values = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    want = processor(QWEN2_5_VL)
    planes = want.normalize(
        want.rescale(np.transpose(values, (2, 0, 1)), 1 / 255), want.image_mean, want.image_std
    )
    assert family.table.shape == (256, 3)
    assert family.table.dtype == np.float32
    assert np.array_equal(family.table, planes[:, 0].T)
    assert not family.table.flags.writeable


# -- layout


@settings(max_examples=num_examples(1000, 200), deadline=None)
@given(
    width=st.integers(1, 8000),
    height=st.integers(1, 8000),
    patch=st.sampled_from([14, 16]),
    min_pixels=st.integers(1, 1 << 18),
    more=st.integers(0, 1 << 24),
)
def test_layout_matches_transformers_for_every_size(
    width: int, height: int, patch: int, min_pixels: int, more: int
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    family = QwenVLFamily(
        FrameSettings(patch=patch, min_pixels=min_pixels, max_pixels=min_pixels + more)
    )
    try:
        want = smart_resize(height, width, 2 * patch, min_pixels, min_pixels + more)
    except ValueError:
        with pytest.raises(MediaRefused):
            family.layout(width, height)
        return
    layout = family.layout(width, height)
    assert (layout.height, layout.width) == want
    assert layout.grid == (1, want[0] // patch, want[1] // patch)


def test_an_aspect_ratio_over_200_is_refused() -> None:
    family = QwenVLFamily(QWEN3_VL)
    family.layout(200, 1)
    with pytest.raises(MediaRefused, match="201x1"):
        family.layout(201, 1)
