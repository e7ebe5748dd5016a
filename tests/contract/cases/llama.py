"""Llama 3: both chat formats, one of them with merges and without weights that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shards import IS_FULL

from tests.contract.case import Case


def _write_llama(path: Path) -> None:
    from sightline.families.llama3 import tiny

    tiny.write(path)


def _write_llama3_with_merges(path: Path) -> None:
    """With merges across newlines, spaces and words, and a chat that says no dates."""
    from sightline.families.llama3 import tiny
    from sightline.families.tiny_checkpoint import ROLE_MERGES, build_tiny_files, read_tiny_settings

    tiny.write(path, type="llama3")
    newlines = (("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("Ġ", "Ċ"), ("Ġ", "Ġ"), ("ĠĊ", "Ċ"))
    words = (("Ġ", "a"), ("t", "h"), ("th", "e"), ("Ġ", "the"), (".", "Ċ"), (".Ċ", "Ċ"))
    tokenizer = tiny.build_tokenizer((*ROLE_MERGES, *newlines, *words))
    tokenizer.save(str(path / "tokenizer.json"))
    files = build_tiny_files(tiny.FOLDER, read_tiny_settings(tiny.FOLDER, "tiny", {}), tokenizer)
    (path / "tokenizer_config.json").write_text(json.dumps(files["tokenizer_config.json"]))
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size(with_added_tokens=True) + 7
    (path / "config.json").write_text(json.dumps(config))


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
