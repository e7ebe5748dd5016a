"""Videos compared with transformers' video processors, which need torchvision."""

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
from sightline.families.qwen_vl.vision import VideoSettings
from sightline.families.registry import write_tiny
from sightline.media import MediaRef
from sightline.message import user, video
from sightline.pixels import Materializer


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_tiny("qwen_vl", path, type=request.param)
    return path


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, local_files_only=True)


def process(processor: Any, frames: np.ndarray, text: str, fps: float) -> Any:
    """Process decoded frames as transformers does, including its choice of frames."""
    metadata = {"total_num_frames": len(frames), "fps": fps}
    return processor(
        text=[text],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=True,
        fps=2,
        return_tensors="pt",
    )


@pytest.mark.parametrize("size", [(84, 56), (64, 96), (40, 200)])
@pytest.mark.parametrize("count", [5, 11, 40])
def test_frames_pixels_and_tokens_match_transformers(
    folder: Path, processor: Any, store: MediaStore, size: tuple[int, int], count: int
) -> None:
    family, renderer = load_family(folder), load_renderer(folder, store)
    frames = noise_frames(count, *size)
    part = video(store.put(encode_video(frames, fps=4)))
    steps = family.steps(part)
    template = "<|vision_start|><|video_pad|><|vision_end|>"
    processed = process(processor, frames, f"see {template}?", 4.0)
    _, height, width = steps[0].item.grid
    assert processed["video_grid_thw"].tolist() == [[len(steps), height, width]]

    materializer = Materializer(family, store, 1 << 24)
    rows = np.concatenate([family.rows(materializer.get(s.item).patches) for s in steps])
    materializer.close()
    theirs = processed["pixel_values_videos"].numpy()
    difference = np.abs(rows - theirs.reshape(rows.shape))
    if (height * family.patch, width * family.patch) == (size[1], size[0]):
        # The levels of 255 are equal. torchvision rounds float32 differently when it normalizes.
        assert difference.max() < 1e-6
    else:
        # Pillow and torchvision round a resized value apart by a level of 255 or two.
        assert difference.max() <= 2 * 2 / 255 / min(family._settings.std) + 1e-5

    ids = processed["input_ids"][0].tolist()
    own = renderer.render([user("see ", part, "?")]).token_ids
    if not family.joins_steps:
        # The template's marks stay around a video that has its own marks. In the processor that was
        # published with the model they go with the pad.
        first = ids.index(renderer._tokenizer.token_id("<|vision_start|>"))
        vision_end = renderer._tokenizer.token_id("<|vision_end|>")
        last = len(ids) - 1 - ids[::-1].index(vision_end)
        del ids[last], ids[first]
    text = renderer._tokenizer.encode_with_starts("see ")[0]
    at = next(i for i in range(len(own)) if own[i : i + len(text)] == text)
    assert own[at : at + len(ids)] == ids
    if family.joins_steps:
        seconds = float(processed["second_per_grid_ts"][0])
        assert steps[0].item.step is not None
        assert seconds == pytest.approx(steps[0].item.step.seconds, rel=1e-6)


def test_frames_and_sizes_match_transformers_for_a_thousand_videos(
    folder: Path, processor: Any
) -> None:
    from transformers.video_utils import VideoMetadata

    family, theirs, rng = load_family(folder), processor.video_processor, random.Random(0)
    for _ in range(1000):
        total, fps = rng.randint(4, 4000), rng.choice([1.0, 4.0, 23.976, 29.97, 30.0, 60.0])
        width, height = (round(2 ** rng.uniform(5, 11)) for _ in range(2))
        wanted = theirs.sample_frames(VideoMetadata(total, fps=fps), fps=2)
        ours = family.sample_frames(total, fps)
        assert ours == [min(int(n), total - 1) for n in wanted][: len(ours)]
        assert len(wanted) - len(ours) in (0, 1)
        ref = MediaRef("0" * 64, "video/mp4", width, height, 1, total, fps)
        patches = theirs.get_num_of_video_patches(len(ours), height, width, {})
        video_steps = family.steps(video(ref))
        assert len(video_steps) * np.prod(video_steps[0].item.grid) == patches


@pytest.mark.parametrize("cap", [True, False])
def test_capped_sizes_match_transformers(folder: Path, processor: Any, cap: bool) -> None:
    import dataclasses

    from transformers.image_utils import SizeDict

    family, theirs, rng = load_family(folder), processor.video_processor, random.Random(1)
    assert isinstance(family.video, VideoSettings)
    family.video = dataclasses.replace(
        family.video,
        min_pixels=4096,
        max_pixels=1 << 20,
        max_video_tokens=theirs.max_video_tokens if cap else 0,
    )
    factor = family.patch * family.merge
    for _ in range(100):
        width, height = (round(2 ** rng.uniform(5, 10)) for _ in range(2))
        frames = rng.choice([2, 5, 8, 33])
        resized = theirs.resize(
            torch.zeros(1, frames, 1, height, width, dtype=torch.uint8),
            SizeDict(shortest_edge=4096, longest_edge=1 << 20),
            0,
            factor=factor,
            temporal_factor=2,
            cap_pixels_per_frame=cap,
        )
        ours = family.fit_frame_size(width, height, frames)
        assert tuple(resized.shape[-2:]) == ours
