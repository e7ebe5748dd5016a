"""Qwen-VL's videos: frames, sizes, times and positions, compared with those of transformers.

transformers' video processors need torchvision: tests/processors has them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shards import num_examples

from sightline import MediaRef, MediaRefused, MediaStore, MessageError, Misaligned
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.families.vision_family import compute_mrope_positions
from sightline.message import user, video
from sightline.wire import MediaItem, Slot, VideoStep

MERGE = 2
IMAGE = MediaRef("0" * 64, "image/png", 64, 64, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = {**small, "vocab_size": 8, "intermediate_size": 8, "num_key_value_heads": 1}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 1, "spatial_merge_size": MERGE}
    config = Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "tokens_per_second": 2})
    with torch.device("meta"):
        return Qwen2_5_VLModel(config)


def steps(offset: int, num: int, side: int, seconds: float) -> list[Slot]:
    """The joined slots of a video of `num` steps, each of `side` by `side` merged tokens."""
    grid, length = (1, side * MERGE, side * MERGE), side * side
    slots = []
    for k in range(num):
        step = VideoStep(number=k, num_frames=2 * num, seconds=seconds, further=(IMAGE,))
        item = MediaItem(IMAGE, "qwen_vl", grid, "f", step=step)
        slots.append(Slot(offset + k * length, length, item))
    return slots


@settings(max_examples=num_examples(200, 40), deadline=None)
@given(
    before=st.integers(1, 9),
    num=st.integers(1, 6),
    side=st.integers(1, 5),
    seconds=st.floats(0.0625, 4.0, width=32),
    behind=st.integers(0, 5),
)
def test_joined_step_positions_match_transformers(
    model: Any, before: int, num: int, side: int, seconds: float, behind: int
) -> None:
    """But for the text behind a video that is longer in time than its frames are wide: it goes on
    behind the largest position of all, as in the release of the model, and as the tokens do that
    transformers itself generates."""
    slots = steps(before, num, side, seconds)
    end = slots[-1].end
    kinds = [0] * before + [2] * (end - before) + [0] * behind
    positions, following = compute_mrope_positions(len(kinds), slots, MERGE, tokens_per_second=2)
    want, delta = model.get_rope_index(
        input_ids=torch.zeros(1, len(kinds), dtype=torch.long),
        mm_token_type_ids=torch.tensor([kinds]),
        video_grid_thw=torch.tensor([(num, side * MERGE, side * MERGE)]),
        second_per_grid_ts=torch.tensor([seconds]),
    )
    assert np.array_equal(positions[:, :end], want[:, 0, :end].numpy())
    largest = int(want[:, 0, :end].max())
    assert positions[:, end:].tolist() == [list(range(largest + 1, largest + 1 + behind))] * 3
    assert following == largest + 1 + behind
    if not behind:
        assert following == len(kinds) + int(delta)
    if positions[0, before:end].max() < before + side:
        assert np.array_equal(positions, want[:, 0].numpy())


def test_joined_steps_must_be_adjacent() -> None:
    first, second, third = steps(3, 3, 1, 1.0)
    compute_mrope_positions(9, [first, second, third], MERGE, tokens_per_second=2)
    for broken in ([second], [first, third], [first, second.shift(1)]):
        with pytest.raises(Misaligned, match="does not follow the step before it"):
            compute_mrope_positions(9, broken, MERGE, tokens_per_second=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_vl")
    write_tiny("qwen_vl", path)
    return path


def change(folder: Path, tmp_path: Path, **values: Any) -> Path:
    """A copy of the checkpoint whose video processor has other settings."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = copy / "video_preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return copy


def test_video_processor_with_other_normalization_disables_only_videos(
    folder: Path, tmp_path: Path, store: MediaStore
) -> None:
    copy = change(folder, tmp_path, image_mean=[0.1, 0.2, 0.3])
    renderer = load_renderer(copy, store)
    ref = store.put(Image.new("RGB", (64, 64)))
    renderer.render([user(ref)])
    part = video([(ref, 0.0), (ref, 1.0)])
    with pytest.raises(MessageError, match=r"content\[0\].*its video processor has mean"):
        renderer.render([user(part)])


def test_template_without_videos_disables_only_videos(
    folder: Path, tmp_path: Path, store: MediaStore
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = copy / "chat_template.jinja"
    file.write_text(file.read_text().replace("'video', 'video_url'", "'film'"))
    renderer = load_renderer(copy, store)
    ref = store.put(Image.new("RGB", (64, 64)))
    renderer.render([user(ref)])
    with pytest.raises(MessageError, match="the chat template fails for a video"):
        renderer.render([user(video([(ref, 0.0), (ref, 1.0)]))])


@pytest.mark.parametrize("times", [(0.0, 1e9), (0.0, 1e300)])
def test_times_beyond_the_position_range_are_refused(
    folder: Path, times: tuple[float, float]
) -> None:
    with pytest.raises(MediaRefused, match="seconds between frames"):
        load_family(folder).steps(video([(IMAGE, times[0]), (IMAGE, times[1])]))


def test_long_video_is_resized_to_the_total_pixel_limit(folder: Path, tmp_path: Path) -> None:
    family = load_family(change(folder, tmp_path, size={"shortest_edge": 4, "longest_edge": 65536}))
    short = MediaRef("1" * 64, "video/mp4", 256, 256, 9, 4, 2.0)
    long = MediaRef("2" * 64, "video/mp4", 256, 256, 9, 64, 2.0)
    areas = [np.prod(family.steps(video(ref))[0].item.grid) * 256 for ref in (short, long)]
    assert areas[0] * 4 <= 65536 and areas[1] * 64 <= 65536
    assert areas[1] < areas[0]
