"""Llama 3: both chat formats, one of them with merges and without weights that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shards import IS_FULL

from tests.contract.case import EXTRA_MERGES, Case


def _write_llama(path: Path) -> None:
    from sightline.families.registry import write_tiny

    write_tiny("llama3", path)


def _write_llama3_with_merges(path: Path) -> None:
    """With a chat that states no dates."""
    from sightline.families.registry import write_tiny

    write_tiny("llama3", path, type="llama3", extra_merges=EXTRA_MERGES[:-1])


def _no_images(path: Path) -> Any:
    raise AssertionError("a text-only checkpoint has no image processor")


def _llama(name: str, write: Any, has_weights: bool) -> Case:
    return Case(
        name,
        write,
        _no_images,
        "",
        published_template=None,
        has_weights=has_weights,
        has_own_format=not has_weights or IS_FULL,
        shows_media=False,
        takes_tools=False,
        carried=str.strip,
        template_settings=lambda tools: {"date_string": "26 Jul 2024"},
    )


CASES = (
    _llama("llama", _write_llama, has_weights=True),
    _llama("llama3_merges", _write_llama3_with_merges, has_weights=False),
)
