"""`python -m benchmarks batch`: its arguments, and the table of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize("wrong", [["--rows", "0"], ["--rows", "2", "--lengths", "100,200"]])
def test_rows_and_lengths_that_cannot_be_are_refused(
    wrong: list[str], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", *wrong, "--model", str(tiny_model)]) != 0
    assert "lengths that have room" in capsys.readouterr().err


def test_prompts_are_measured_against_the_matrix_peak(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompts", "1,3", "--scale", "0.2", "--repeats", "1", "--device", "cpu"]
    assert main(["batch", *words, "--model", str(tiny_model)]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("│ engine")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    tokens = [int(row[2]) for row in cells]
    assert [row[1] for row in cells] == ["1", "3"]
    assert tokens[1] == pytest.approx(3 * tokens[0], abs=2 * 64)  # texts differ in their tokens
    assert all(float(row[-1].rstrip("%")) <= 100 for row in cells)
    assert main(["batch", "--prompts", "0", "--model", str(tiny_model)]) != 0
    assert "1 prompt or more" in capsys.readouterr().err
    assert main(["batch", "--prompts", "1", "--rows", "1"]) != 0
    assert "give one of them" in capsys.readouterr().err
