"""The check that ends `make demo-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "rise.py"


@pytest.mark.parametrize(
    ("start", "final", "code", "words"),
    [
        (0.578, 0.865, 0, "rose by 0.287"),
        (0.578, 0.6, 1, "no rise of 0.1"),
        (0.6, 0.5, 1, "no rise of 0.1"),
        (None, 0.5, 1, "was not evaluated"),
    ],
)
def test_run_without_learning_fails(
    tmp_path: Path, start: float | None, final: float, code: int, words: str
) -> None:
    summary = {"reward_start": start, "reward_final": final, "steps": 24}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == code and words in done.stdout + done.stderr
