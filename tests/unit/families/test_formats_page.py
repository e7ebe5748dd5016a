"""The table of docs/chat_formats.md says of every chat format what its code does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sightline.families.glm_v.render import Glm45V, Glm46V
from sightline.families.kimi_k25.render import KimiK25Renderer
from sightline.families.llama3.render import Llama3, Llama31
from sightline.families.qwen_vl.formats import FORMATS

PAGE = Path(__file__).parents[3] / "docs" / "chat_formats.md"
QWEN = {known for formats in FORMATS.values() for known in formats}
COLUMNS = {"Llama 3, 3.1": {Llama3, Llama31}, "GLM-4.6V, GLM-4.5V": {Glm46V, Glm45V}}
SEES_NOTHING = ("Qwen3", "Llama 3", "Llama 3.1")


def read_column(format_name: str) -> dict[str, str]:
    """The cells of a format, by the names of their rows."""
    lines = PAGE.read_text().partition("## Supported features")[2].split("\n## ")[0].splitlines()
    table = [line.strip("| ").replace("\\|", "").split(" | ") for line in lines if line[:1] == "|"]
    names, _, *rows = table
    at = next(i for i, name in enumerate(names) if _is_of(format_name, name))
    return {row[0]: row[at + 1].strip() for row in rows}


def _is_of(format_name: str, column: str) -> bool:
    formats = {known.format_name for known in COLUMNS.get(column, ())}
    return format_name in formats or format_name.removesuffix(" non-thinking") == column


@pytest.mark.parametrize(
    "known",
    sorted([*QWEN, Llama3, Llama31, Glm46V, Glm45V, KimiK25Renderer], key=lambda k: k.format_name),
    ids=lambda known: known.format_name,
)
def test_a_format_takes_what_the_table_says(known: Any) -> None:
    cells = read_column(known.format_name)
    assert len(cells) == 8
    assert (cells["tools and calls"] == "refused") == (not known.takes_tools)
    assert (cells["reasoning"] == "refused") == (not known.takes_reasoning)
    shown = cells["images"]
    if known is Glm45V:
        shown = shown.partition("; 4.5V ")[2]
    roles = ", ".join(known.image_roles)
    wanted = "refused" if known.format_name in SEES_NOTHING else roles
    assert shown.partition("; ")[0] == wanted
    videos = cells["[videos](video.md)"]
    assert videos == ("refused" if known is KimiK25Renderer else cells["images"])
