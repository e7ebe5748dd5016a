"""Every example loads, and holds as far as that can be seen without its model's weights.

In place of a published model stands a tiny one of the same type: names of layers, chat format and
token counts of images are the type's own.
"""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from sightline import config
from sightline.cli.config import detect_file_kind
from sightline.compute.model import load_model
from sightline.config import RunFile, SftFile
from sightline.envs.protocol import build_environment
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.launch.checks.model import check_token_ids, find_family
from sightline.launch.checks.settings import check_compatible_settings
from sightline.media import MediaStore
from sightline.trainer.lora import add_adapters

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("*/*.toml"))
TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "Qwen/Qwen3-VL-4B-Instruct": ("qwen_vl", {"type": "qwen3_vl"}),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("qwen_vl", {"type": "qwen3_vl_moe"}),
    "moonshotai/Kimi-K2.5": ("kimi_k25", {}),
}
NAMES = [f"{path.parent.name}/{path.stem}" for path in FILES]
PUBLISHED = [
    path for path in FILES if config.load_config(detect_file_kind(path), path).model.path in TYPES
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders: dict[str, Path] = {}

    def of(model: str) -> Path:
        if model not in folders:
            folders[model] = tmp_path_factory.mktemp("models") / model.replace("/", "-")
            family, options = TYPES[model]
            write_tiny(family, folders[model], seed=0, **options)
        return folders[model]

    return of


# The environment of the mini browser asks for Chromium.
MARKED = [
    pytest.param(path, marks=[pytest.mark.browser] if path.parent.name == "mini_browser" else [])
    for path in FILES
]


@pytest.mark.parametrize("path", MARKED, ids=NAMES)
def test_example_loads_with_consistent_settings(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.parent.name == "dataset":  # its rows are drawn first
        draw = runpy.run_path(str(path.parent / "draw.py"))
        draw["write_folder"](tmp_path / "shapes", draw["draw_rows"](200, seed=0))
        monkeypatch.chdir(tmp_path)
    file = config.load_config(detect_file_kind(path), path)
    assert file == config.validate_config(type(file), config_values(file), str(path))
    if isinstance(file, RunFile):
        check_compatible_settings(file)
    if file.env is not None:
        environment = build_environment(file.env)
        assert environment.task(0, "train") != environment.task(1, "train")


def config_values(file: RunFile | SftFile) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(config.dump_toml(file))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_example_settings_work_with_a_tiny_model_of_the_same_type(
    path: Path, tiny: Any, store: MediaStore
) -> None:
    file = config.load_config(detect_file_kind(path), path)
    model = tiny(file.model.path)
    settings = file.model.model_copy(update={"path": str(model)})
    if file.env is not None:
        find_family(file.model_copy(update={"model": settings}))
    family = load_family(model)
    check_token_ids(settings, family)
    if file.lora.rank:
        forward = load_model(model, family, "cpu", "float32")
        add_adapters(forward, file.lora, settings.train_vision, seed=0)
        vision = {name for name, p in forward.vision_parameters() if p.requires_grad}
        assert bool(vision) == settings.train_vision
    if isinstance(file, RunFile):
        longest = longest_conversation(file, model, store)
        assert longest + file.rollout.max_tokens <= file.inference.max_model_len
        gpus = {f"cuda:{rank}" for rank in range(file.trainer.ranks)}
        assert file.inference.device not in gpus, "a GPU of its own, where there are several"


def longest_conversation(file: RunFile, model: Path, store: MediaStore) -> int:
    """In tokens of the tiny vocabulary, whose texts are longer than any real one's."""
    environment: Any = build_environment(file.env)
    renderer = load_renderer(model, store)
    longest = 0
    for i in range(6):
        task = environment.task(i, "train")
        talk = environment.demonstration(task, store.put, random.Random(i))
        turn = renderer.render(talk, environment.tools).token_ids
        num_turns = sum(message.role == "assistant" for message in talk)
        longest = max(longest, len(turn) * environment.max_turns // num_turns)
    return longest
