"""`python -m benchmarks render`, on a few small pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.render import Turn, closing_lines, make_table, shown_turns


def test_a_turn_holds_references_and_says_what_it_cost(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--turns", "3", "--width", "96", "--height", "64", "--model", str(tiny_model)]
    assert main(["render", *words, "--dir", str(tmp_path / "kept")]) == 0
    printed = capsys.readouterr().out
    assert "3 turns, 96x64" in printed
    assert "bridge: " in printed and "put: " in printed


def test_turns_must_be_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--turns", "0"]) == 2
    assert "--turns 0" in capsys.readouterr().err


def test_the_tokenizer_of_another_checkpoint_is_taken(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--turns", "1", "--width", "96", "--height", "64", "--tokenizer", str(tiny_model)]
    assert main(["render", *words]) == 0
    assert main(["render", *words, "--model", str(tiny_model)]) == 2
    assert "a model has its own tokenizer" in capsys.readouterr().err


def test_both_sides_stand_in_the_table_and_in_the_closing_lines() -> None:
    ours = [Turn(1e-4, 300 * (i + 1), 100 * (i + 1), 1e-3) for i in range(20)]
    theirs = [Turn(0.1, 30_000_000 * (i + 1), 100 * (i + 1)) for i in range(20)]
    assert shown_turns(20) == [1, 2, 5, 10, 20]
    assert make_table(ours, theirs).row_count == 5
    assert make_table(ours, []).row_count == 5
    told = "\n".join(closing_lines(ours, theirs))
    assert "1000 times our bridge" in told and "91 times our put and bridge" in told
    assert "second half over first half 1.00" in closing_lines(ours, [])[0]
