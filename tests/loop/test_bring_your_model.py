"""The page "bring your model", command by command: train a model that none of our files names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loop.conftest import SMALL
from loop.jobs import EXAMPLES, ROOT, sightline, summary
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]
PAGE = (ROOT / "docs" / "bring_your_model.md").read_text()


def test_documented_steps_lead_from_checkpoint_to_first_run(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    lines = [line for line in PAGE.splitlines() if line.startswith("sightline ")]
    commands = [
        line.replace("examples/color_codeword", str(EXAMPLES)).split()[1:] for line in lines
    ]
    assert [words[0] for words in commands] == ["check", "sft", "rl"]
    check, sft, rl = commands
    (blocks,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    completed = sightline(*check, cwd=tmp_path).stdout.splitlines()
    assert [line for line in blocks.splitlines()[1:] if line not in completed] == []
    sightline(*sft, cwd=tmp_path)
    sightline(*rl, "--plain", *SMALL, "rollout.max_tokens=6", cwd=tmp_path)
    run_summary = summary(RunDir(tmp_path / "runs" / "job-001"))
    assert run_summary["steps"] == 3
    assert run_summary["mismatch_kl"] < 1e-6
