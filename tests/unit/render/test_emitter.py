"""Runs of text, spans, and the boundary before sampled text."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from sightline import FamilyError
from sightline.render import Emitter, Tokenizer
from sightline.wire import Span

# Letters a, b, c and the merge "ab"; "<s>" is an added token.
A, B, C, AB, S = range(5)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    full = tokenizers.Tokenizer(BPE(vocab={"a": A, "b": B, "c": C, "ab": AB}, merges=[("a", "b")]))
    full.pre_tokenizer = Split(" ", "removed")
    full.add_tokens([tokenizers.AddedToken("<s>", special=True)])
    full.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_token_across_the_boundary_is_not_trained(tokenizer: Tokenizer) -> None:
    emitter = Emitter(tokenizer)
    emitter.text("ca")
    emitter.begin_trained()
    emitter.text("bc")
    emitter.special(S)
    emitter.end_trained()
    rendered = emitter.rendered()
    assert rendered.token_ids == [C, AB, C, S]
    assert rendered.trained == [Span(2, 4)]


def test_missing_special_token_is_named(tokenizer: Tokenizer) -> None:
    assert tokenizer.find_token_id("<t>") is None
    with pytest.raises(FamilyError, match="<t>"):
        tokenizer.token_id("<t>")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="tokenizer.json"):
        Tokenizer(tmp_path)
