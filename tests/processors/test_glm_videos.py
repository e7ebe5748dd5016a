"""GLM's videos compared with transformers' whole processors, which need torchvision."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from videos import encode_video, noise_frames

from sightline import MediaStore
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.media import MediaRef
from sightline.message import user, video
from sightline.pixels import Materializer


@pytest.fixture(scope="module", params=["glm46v", "glm4v"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_tiny("glm_v", path, seed=0, type=request.param)
    return path


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("size", [(84, 56), (64, 96), (40, 200)])
@pytest.mark.parametrize("count", [5, 11, 40])
def test_frames_pixels_and_tokens_match_transformers(
    folder: Path, processor: Any, store: MediaStore, size: tuple[int, int], count: int
) -> None:
    family: Any = load_family(folder)
    renderer = load_renderer(folder, store)
    frames = noise_frames(count, *size)
    part = video(store.put(encode_video(frames, fps=4)))
    steps = family.steps(part)
    talk = [{"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "video"}]}]
    text = processor.apply_chat_template(talk, add_generation_prompt=True, enable_thinking=False)
    processed = processor(
        text=[text],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[{"total_num_frames": count, "fps": 4.0, "duration": count / 4}],
        do_sample_frames=True,
    )
    _, height, width = steps[0].item.grid
    assert processed["video_grid_thw"].tolist() == [[len(steps), height, width]]
    assert renderer.render([user("see ", part)]).token_ids == processed["input_ids"][0]

    materializer = Materializer(family, store, 1 << 24)
    rows = np.concatenate([family.rows(materializer.get(s.item).patches) for s in steps])
    materializer.close()
    difference = np.abs(rows - np.asarray(processed["pixel_values_videos"]).reshape(rows.shape))
    if (height * family.patch, width * family.patch) == (size[1], size[0]):
        # The levels of 255 are equal. torchvision rounds float32 differently when it normalizes.
        assert difference.max() < 1e-6
    else:
        # Pillow and torchvision round a resized value apart by a level of 255 or two.
        assert difference.max() <= 2 * 2 / 255 / min(family._settings.std) + 1e-5


def test_frames_and_sizes_match_transformers_for_a_thousand_videos(
    folder: Path, processor: Any
) -> None:
    from transformers.video_utils import VideoMetadata

    family: Any = load_family(folder)
    theirs, rng = processor.video_processor, random.Random(0)
    for _ in range(1000):
        total, fps = rng.randint(60, 4000), rng.choice([1.0, 4.0, 23.976, 29.97, 30.0, 60.0])
        width, height = (round(2 ** rng.uniform(5, 11)) for _ in range(2))
        wanted = theirs.sample_frames(VideoMetadata(total, fps=fps, duration=total / fps))
        steps = family.steps(video(MediaRef("0" * 64, "video/mp4", width, height, 1, total, fps)))
        assert [n for step in steps for n in step.item.step.frames] == wanted.tolist()
        patches = theirs.get_num_of_video_patches(len(wanted), height, width, {})
        assert len(steps) * np.prod(steps[0].item.grid) == patches
