"""Videos of GLM: frames, times and positions, beside what transformers computes.

transformers' video processors need torchvision: tests/processors has them. Here their rules are
taken out of their source.
"""

from __future__ import annotations

import ast
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import num_examples

from sightline import MediaRef, MediaStore, MessageError
from sightline.families import load_family, load_renderer
from sightline.families.glm_v.settings import VideoSettings
from sightline.families.glm_v.video import sample_frames
from sightline.families.registry import write_tiny
from sightline.message import user, video

IMAGE = MediaRef("0" * 64, "image/png", 56, 28, 1)
DENSE = VideoSettings(is_dynamic=True, min_pixels=1, max_pixels=1 << 30)
EVEN = VideoSettings(is_dynamic=False, min_pixels=1, max_pixels=1 << 30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("glm46v", "glm4v"):
        write_tiny("glm_v", root / kind, seed=0, type=kind)
    return root


def find_rule(kind: str) -> Callable[[int, float], list[int]]:
    """The rule of a video processor of transformers, which itself imports torchvision."""
    import transformers
    from transformers.video_utils import VideoMetadata

    source = Path(transformers.__file__).parent / f"models/{kind}/video_processing_{kind}.py"
    functions = (
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "sample_frames"
    )
    names: dict[str, Any] = {"math": math, "np": np, "VideoMetadata": VideoMetadata}
    exec(compile(ast.Module([next(functions)], []), kind, "exec"), names)
    processor = SimpleNamespace(temporal_patch_size=2, fps=2, max_duration=300)

    def take(total: int, fps: float) -> list[int]:
        metadata = VideoMetadata(total, fps=fps, duration=total / fps)
        return [int(n) for n in names["sample_frames"](processor, metadata)]

    return take


@pytest.mark.parametrize(("kind", "rule"), [("glm46v", DENSE), ("glm4v", EVEN)])
def test_frames_are_those_that_the_rules_take(kind: str, rule: VideoSettings) -> None:
    theirs = find_rule(kind)

    @settings(max_examples=num_examples(300, 60), deadline=None)
    @given(
        total=st.integers(2, 400) | st.integers(2, 20_000),
        fps=st.sampled_from([0.25, 1.0, 4.0, 23.976, 29.97, 30.0, 60.0]),
    )
    def compare(total: int, fps: float) -> None:
        ours = sample_frames(total, fps, rule, 2)
        assert ours == theirs(total, fps)
        # Of a tenth of a second, the rule of GLM-4.6V takes nothing.
        assert len(ours) % 2 == 0 and ours == sorted(ours) and max(ours, default=0) < total

    compare()


def test_times_are_those_of_the_first_frame_of_a_step(folders: Path, store: MediaStore) -> None:
    part = video([(IMAGE, 0.0), (IMAGE, 0.4), (IMAGE, 1.26), (IMAGE, 2.0), (IMAGE, 3.5)])
    for kind, times in (
        ("glm46v", ["0.0 seconds", "1.3 seconds", "3.5 seconds"]),
        ("glm4v", ["0", "1", "3"]),
    ):
        renderer = load_renderer(folders / kind, store)
        said = renderer.decode(renderer.render([user(part)]).token_ids)
        steps = [f"<|begin_of_image|><|image|><|image|><|end_of_image|>{time}" for time in times]
        assert f"<|user|>\n<|begin_of_video|>{''.join(steps)}<|end_of_video|>" in said


def test_positions_of_images_and_videos_are_those_of_the_model(
    folders: Path, store: MediaStore
) -> None:
    from transformers import AutoConfig, Glm46VModel

    with torch.device("meta"):
        model = Glm46VModel(AutoConfig.from_pretrained(folders / "glm46v"))
    family, renderer = load_family(folders / "glm46v"), load_renderer(folders / "glm46v", store)
    film = MediaRef("1" * 64, "video/mp4", 140, 84, 9, 10, 4.0)
    wide = MediaRef("2" * 64, "image/png", 300, 40, 1)
    rendered = renderer.render([user("a", wide, video(film), IMAGE, "b", video(film), wide)])
    kinds, grids = torch.zeros(1, len(rendered.token_ids), dtype=torch.int32), {1: [], 2: []}
    for slot in rendered.slots:
        step = slot.item.step
        kinds[0, slot.offset : slot.end] = 1 if step is None else 2
        if step is None:
            grids[1].append(slot.item.grid)
        elif step.number == 0:
            grids[2].append((step.num_steps, *slot.item.grid[1:]))
    want, delta = model.get_rope_index(
        torch.tensor([rendered.token_ids]),
        kinds,
        image_grid_thw=torch.tensor(grids[1]),
        video_grid_thw=torch.tensor(grids[2]),
    )
    found, following = family.positions(len(rendered.token_ids), rendered.slots)
    assert len(grids[1]) == 3 and len(grids[2]) == 2 and len(rendered.slots) > 5
    assert np.array_equal(found, want[:, 0].numpy())
    assert following == len(rendered.token_ids) + int(delta)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"image_mean": [0.1, 0.2, 0.3]}, "its video processor has mean"),
        ({"patch_size": 16}, "its video processor has patch = 16"),
        ({"processor_class": "Glm4vProcessor"}, "its processors are Glm46VVideoProcessor and"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "its video processor has VideoSet"),
    ],
)
def test_a_video_processor_with_other_rules_refuses_videos_alone(
    folders: Path, tmp_path: Path, store: MediaStore, changes: dict[str, Any], why: str
) -> None:
    copy = Path(shutil.copytree(folders / "glm46v", tmp_path / "copy"))
    file = copy / "video_preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    renderer = load_renderer(copy, store)
    assert renderer.render([user(IMAGE)]).slots
    with pytest.raises(MessageError, match=rf"content\[0\].*{why}"):
        renderer.render([user(video([(IMAGE, 0.0), (IMAGE, 1.0)]))])
