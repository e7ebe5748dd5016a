"""A checkpoint's tokenizer.json may be hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sightline.errors import FamilyError, MessageError
from sightline.families.registry import write_tiny
from sightline.render import tokenizer
from sightline.render.tokenizer import Tokenizer


def test_text_on_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    write_tiny("qwen_vl", tmp_path, seed=0)
    file = tmp_path / "tokenizer.json"
    description = json.loads(file.read_text())
    for part in description["pre_tokenizer"]["pretokenizers"]:
        if "Regex" in part.get("pattern", {}):
            part["pattern"]["Regex"] = "((a+)+)+$"
    file.write_text(json.dumps(description))
    hostile = Tokenizer(tmp_path)
    for encode in (hostile.encode_marked, hostile.encode_with_starts):
        with pytest.raises(MessageError, match="the tokenizer fails on a text of 32 characters"):
            encode("a" * 30 + "b!")


def test_huge_tokenizer_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", tokenizer.MAX_BYTES + 1)
    with pytest.raises(FamilyError, match="above the limit"):
        Tokenizer(tmp_path)
