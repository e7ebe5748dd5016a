"""`sightline bench batch`: engine and transformers, on the same requests, say the same."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from serving import serve_here

from sightline.bench import batch
from sightline.bench.harness import workspace
from sightline.cli.main import main


class CommandHere:
    """In the place of a process: its command, in this one, where torch is imported."""

    def __init__(self, words: Sequence[str], threads: int) -> None:
        self.out = io.StringIO()
        with redirect_stdout(self.out):
            self.returncode = main(list(words))

    def communicate(self) -> tuple[str, None]:
        return self.out.getvalue(), None


def test_many_requests_at_once_are_answered_as_one_padded_batch(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "start_sightline", CommandHere)
    monkeypatch.setattr(workspace, "temporary_server", serve_here)
    words = ["--requests", "5", "--one-by-one", "2", "--max-tokens", "6", "--scale", "0.2"]
    words += ["--repeats", "1", "--device", "cpu", "--model", str(tiny_model)]
    assert main(["bench", "batch", *words]) == 0
    out = capsys.readouterr().out
    assert "token for token: 5 of 5" in out
    assert len(re.findall(r"\d times", out)) == 2


@pytest.mark.parametrize("wrong", [["--rows", "0"], ["--rows", "2", "--lengths", "100,200"]])
def test_rows_and_lengths_that_cannot_be_are_refused(
    wrong: list[str], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "batch", *wrong, "--model", str(tiny_model)]) != 0
    assert "lengths that have room" in capsys.readouterr().err


def test_prompts_are_measured_against_the_matrix_peak(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompts", "1,3", "--scale", "0.2", "--repeats", "1", "--device", "cpu"]
    assert main(["bench", "batch", *words, "--model", str(tiny_model)]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("│ engine")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    tokens = [int(row[2]) for row in cells]
    assert [row[1] for row in cells] == ["1", "3"]
    assert tokens[1] == pytest.approx(3 * tokens[0], abs=2 * 64)  # texts differ in their tokens
    assert all(float(row[-1].rstrip("%")) <= 100 for row in cells)
    assert main(["bench", "batch", "--prompts", "0", "--model", str(tiny_model)]) != 0
    assert "1 prompt or more" in capsys.readouterr().err
    assert main(["bench", "batch", "--prompts", "1", "--rows", "1"]) != 0
    assert "give one of them" in capsys.readouterr().err
