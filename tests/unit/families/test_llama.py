"""Supported checkpoints of the model type `llama`, and the refusals of their chat format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline import FamilyError, MediaStore, MessageError
from sightline.families import load_renderer
from sightline.families.registry import write_tiny
from sightline.message import user

OPENED = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
DATED = "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    write_tiny("llama3", path, seed=0)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "llama"))


@pytest.fixture
def render(folder: Path, store: MediaStore) -> Callable[[], str]:
    def spelled() -> str:
        renderer = load_renderer(folder, store)
        return renderer.decode(renderer.render([user("hi")]).token_ids)

    return spelled


def test_template_decides_whether_dates_are_written(
    folder: Path, render: Callable[[], str]
) -> None:
    assert render().startswith("<|begin_of_text|>" + DATED)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("says_dates = true", "says_dates = false"))
    assert render().startswith(OPENED)
    template.unlink()
    assert DATED in render()


def test_template_using_the_clock_gets_a_fixed_date(
    folder: Path, render: Callable[[], str]
) -> None:
    template = folder / "chat_template.jinja"
    template_date = 'default(strftime_now("%d %b %Y"))'
    template.write_text(template.read_text().replace('default("26 Jul 2024")', template_date))
    assert template_date in template.read_text()
    assert "Today Date: 26 Jul 2024\n" in render()


def test_different_chat_template_is_refused_with_its_first_difference(
    folder: Path, store: MediaStore
) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace(" | trim", ""))
    with pytest.raises(FamilyError, match=r"Llama 3\.1: for .* it writes .* Llama 3: for "):
        load_renderer(folder, store)
    template.write_text("{{ raise_exception('no system message here') }}")
    with pytest.raises(FamilyError, match="the template fails: no system message here"):
        load_renderer(folder, store)


def test_tokenizer_from_another_llama_is_refused(folder: Path, store: MediaStore) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|start_header_id|>", "[INST]"))
    with pytest.raises(FamilyError, match=r"has no token '<\|start_header_id\|>'"):
        load_renderer(folder, store)


def test_tools_are_refused_with_the_reason(whole: Path, store: MediaStore) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(MessageError, match="a tool call of Llama 3 has no mark"):
        load_renderer(whole, store).render([user("a")], [tool])


def test_tied_checkpoint_stores_its_embedding_once(tmp_path: Path) -> None:
    write_tiny("llama3", tmp_path, seed=0, tied=True)
    header = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert "lm_head.weight" not in json.loads(header[8 : 8 + size])
