"""A teacher scores the student's tokens by their ids, so each must be the same token for both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sightline.errors import ConfigError
from sightline.families.registry import load_renderer, write_tiny
from sightline.media import MediaStore
from sightline.render import Renderer, check_vocabularies


@pytest.fixture
def renderers(tmp_path: Path, store: MediaStore) -> list[Renderer]:
    """Return a student, and a teacher in whose tokenizer A and B swap their ids."""
    for name in ("student", "teacher"):
        write_tiny("qwen_vl", tmp_path / name)
    file = tmp_path / "teacher" / "tokenizer.json"
    description = json.loads(file.read_text())
    vocabulary = description["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(description))
    return [load_renderer(tmp_path / name, store) for name in ("student", "teacher")]


def test_first_token_with_another_id_is_named(renderers: list[Renderer]) -> None:
    student, teacher = renderers
    assert student.vocab_size == teacher.vocab_size
    first = student.tokenizer.token_id("A")
    expected = f"T has another vocabulary .*: token {first} is 'A' for the policy and 'B' for the"
    with pytest.raises(ConfigError, match=expected):
        check_vocabularies(student, teacher, "T")


def test_banned_tokens_and_rows_without_a_token_may_differ(renderers: list[Renderer]) -> None:
    student, teacher = renderers
    student.pad_token_ids += tuple(map(student.tokenizer.token_id, "AB"))
    teacher.vocab_size += 128
    check_vocabularies(student, teacher, "T")
    teacher.vocab_size = student.vocab_size - 1
    with pytest.raises(ConfigError, match=r"the policy has \d+ tokens, the teacher \d+"):
        check_vocabularies(student, teacher, "T")
