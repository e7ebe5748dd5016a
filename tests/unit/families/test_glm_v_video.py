"""GLM's videos: frames, times and positions, compared with those of transformers.

transformers' video processors need torchvision: tests/processors has them. The rules used here are
extracted from their source.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline import MediaRef, MediaStore, MessageError
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.message import user, video

IMAGE = MediaRef("0" * 64, "image/png", 56, 28, 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("glm46v", "glm4v"):
        write_tiny("glm_v", root / kind, seed=0, type=kind)
    return root


def test_image_and_video_positions_match_the_model(folders: Path, store: MediaStore) -> None:
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
    positions, following = family.positions(len(rendered.token_ids), rendered.slots)
    assert len(grids[1]) == 3 and len(grids[2]) == 2 and len(rendered.slots) > 5
    assert np.array_equal(positions, want[:, 0].numpy())
    assert following == len(rendered.token_ids) + int(delta)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"image_mean": [0.1, 0.2, 0.3]}, "its video processor has mean"),
        ({"patch_size": 16}, "its video processor has patch = 16"),
        ({"processor_class": "Glm4vProcessor"}, "its processors are Glm46VVideoProcessor and"),
        (
            {"size": {"shortest_edge": 9, "longest_edge": 8}},
            "its video processor has unusable settings",
        ),
    ],
)
def test_unsupported_video_processor_disables_only_videos(
    folders: Path, tmp_path: Path, store: MediaStore, changes: dict[str, Any], why: str
) -> None:
    copy = Path(shutil.copytree(folders / "glm46v", tmp_path / "copy"))
    file = copy / "video_preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    renderer = load_renderer(copy, store)
    assert renderer.render([user(IMAGE)]).slots
    with pytest.raises(MessageError, match=rf"content\[0\].*{why}"):
        renderer.render([user(video([(IMAGE, 0.0), (IMAGE, 1.0)]))])
