"""Our checkpoints and pixels compared with transformers' processors that need torchvision."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
from PIL import Image

from sightline import MediaStore
from sightline.families import Family, load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.message import user
from sightline.trainer.export import export_checkpoint

SIZES = [(28, 28), (29, 27), (640, 480), (300, 20), (1280, 720), (7, 900), (2500, 1900), (9000, 40)]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "kimi"
    write_tiny("kimi_k25", path, seed=0)
    return path


@pytest.fixture(scope="module")
def kimi_images(kimi: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(kimi, local_files_only=True)


def noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 7919 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def photo(width: int, height: int) -> Image.Image:
    """Smooth, as most pictures are: a few waves in each channel."""
    x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 4, height))
    waves = [np.sin(x + c) * np.cos(y * (1 + c / 2)) for c in range(3)]
    return Image.fromarray((127.5 + 127 * np.stack(waves, -1)).astype(np.uint8))


def test_full_processor_loads(tiny_model: Path) -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_model, local_files_only=True)
    assert processor.image_token == "<|image_pad|>"
    assert processor.chat_template


def test_exported_checkpoint_loads_in_transformers_with_its_processor(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    """Its prompt and logprobs are those of Sightline: the comparison in docs/your_model.md."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    learner = making.build_learner(
        making.model_config(tiny_model), making.trainer_config(), store, steps=1
    )
    with torch.no_grad():
        for parameter in learner.forward.model.parameters():
            parameter.mul_(0.9)
    exported = tmp_path / "exported"
    export_checkpoint(tiny_model, exported, learner.forward.model)
    processor = AutoProcessor.from_pretrained(exported, local_files_only=True)
    model = AutoModelForImageTextToText.from_pretrained(exported, local_files_only=True)

    image, family = photo(640, 480), load_family(str(exported))
    rendered = load_renderer(exported, store, family).render([user(store.put(image), "colour?")])
    content = [{"type": "image", "image": image}, {"type": "text", "text": "colour?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert inputs["input_ids"][0].tolist() == list(rendered.token_ids)
    answer = torch.tensor([[5, 6, 7]])
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in inputs:
            rest = answer if name == "input_ids" else torch.full_like(answer, name[0] == "a")
            inputs[name] = torch.cat([inputs[name], rest], dim=1)
    with torch.no_grad():
        logits = model(**inputs).logits[0, len(rendered.token_ids) - 1 : -1]
    logits[:, list(learner.pad_ids)] = float("-inf")
    theirs = torch.log_softmax(logits, -1).gather(1, answer.T)[:, 0]
    ours = making.trainer_logprobs(learner, store, rendered, answer[0].tolist())
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("draw", [noise, photo])
def test_kimi_pixels_match_transformers(
    draw: Any, size: tuple[int, int], kimi: Path, kimi_images: Any, store: MediaStore
) -> None:
    family: Family = load_family(str(kimi))
    image = draw(*size)
    item = family.item(store.put(image))
    rows = family.rows(family.patches(image, item))
    theirs = kimi_images(images=[image], return_tensors="np")
    assert theirs["image_grid_thw"].tolist() == [list(item.grid)]
    difference = np.abs(rows - theirs["pixel_values"].reshape(rows.shape)).max()
    layout = family.layout(*size)
    if (layout.width, layout.height) == size:
        assert difference == 0
    else:
        # Rows run from -1 to 1: a level of 255 is 2 / 255 of them.
        assert difference <= 2 * (2 / 255) + 1e-6


def test_kimi_grids_match_transformers_for_a_thousand_sizes(kimi: Path, kimi_images: Any) -> None:
    family = load_family(str(kimi))
    rng = random.Random(0)
    for _ in range(1000):
        width, height = (round(2 ** rng.uniform(0, 13)) for _ in range(2))
        layout = family.layout(width, height)
        patches = kimi_images.get_number_of_image_patches(height, width)
        assert layout.grid[1] * layout.grid[2] == patches, (width, height)
        assert layout.num_tokens == patches // kimi_images.merge_size**2
