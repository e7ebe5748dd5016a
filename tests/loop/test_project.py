"""A new project from its first command to its first steps, and the same run from Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loop.jobs import ROOT, sightline, summary
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(900)]

RUN = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[2]

NOTEBOOK = """
import json, sys, nbformat, nbclient
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.argv[1])])
nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
print(json.dumps(book.cells[0].outputs))
"""


def test_a_new_project_is_tested_warmed_up_and_trained(tmp_path: Path) -> None:
    sightline("init", "colors", cwd=tmp_path)
    home = tmp_path / "colors"
    assert "problems: 0" in sightline("try", "environment:ColorsEnv", cwd=home).stdout
    sightline("model", "tiny", "models/tiny", cwd=home)
    sightline("sft", "warmup.toml", "run.steps=60", cwd=home)
    sightline("rl", "--plain", "rl.toml", "run.steps=20", "eval.tasks=64", cwd=home)
    run_summary = summary(RunDir(home / "runs" / "colors-001"))
    assert run_summary["reward_final"] > run_summary["reward_start"] > 0.05, (
        "answers have the right form"
    )

    # Train in a notebook, whose cell prints the steps.
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, RUN], cwd=home, capture_output=True, text=True,
        timeout=300, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = json.loads(done.stdout.splitlines()[-1])
    assert any("<run colors-002: finished, step 2>" in out.get("text", "") for out in outputs)
    assert any("step 2/2" in out.get("text", "") for out in outputs)
