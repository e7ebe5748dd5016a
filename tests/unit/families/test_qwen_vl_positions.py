"""MRoPE positions compared with transformers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.families.vision_family import compute_mrope_positions
from sightline.media import MediaRef
from sightline.wire import MediaItem, Slot

MERGE = 2
REF = MediaRef("0" * 64, "image/png", 1, 1, 1)
sides = st.integers(1, 12).map(lambda side: side * MERGE)
# Images are never adjacent: their marks are between them.
images = st.lists(st.tuples(st.integers(1, 20), sides, sides), max_size=5)


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = {**small, "vocab_size": 8, "intermediate_size": 8, "num_key_value_heads": 1}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 1, "spatial_merge_size": MERGE}
    config = Qwen3VLConfig(
        text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}
    )
    with torch.device("meta"):
        return Qwen3VLModel(config)


def slot(offset: int, length: int, grid: tuple[int, int, int]) -> Slot:
    return Slot(offset, length, MediaItem(REF, "qwen_vl", grid, "f"))


@settings(max_examples=200, deadline=None)
@given(images=images, tail=st.integers(1, 20))
def test_positions_match_transformers(
    model: Any, images: list[tuple[int, int, int]], tail: int
) -> None:
    import torch

    slots, kinds = [], []
    for text, height, width in images:
        length = height * width // MERGE**2
        slots.append(slot(len(kinds) + text, length, (1, height, width)))
        kinds += [0] * text + [1] * length
    kinds += [0] * tail
    positions, end = compute_mrope_positions(len(kinds), slots, MERGE)

    want, delta = model.get_rope_index(
        input_ids=torch.zeros(1, len(kinds), dtype=torch.long),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor([(1, h, w) for _, h, w in images]) if images else None,
    )
    assert np.array_equal(positions, want[:, 0].numpy())
    assert end == len(kinds) + int(delta)
