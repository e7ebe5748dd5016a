"""Shapes in annotations are checked where the tests run: a wrong one raises, by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from jaxtyping import install_import_hook
install_import_hook({modules!r}, "shape_checks.check_shapes")
import torch
from sightline.algo.losses import LossInputs, exact_kl, mismatch_kl, ppo
{statement}
"""


def run(statement: str) -> subprocess.CompletedProcess[str]:
    makefile = (ROOT / "Makefile").read_text()
    found = re.search(r"^SHAPED := (.*)$", makefile, re.M)
    assert found, "the Makefile says which modules are checked"
    program = PROGRAM.format(
        tests=str(ROOT / "tests"), modules=found[1].split(","), statement=statement
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("mismatch_kl(torch.zeros(3), torch.zeros(4))", "mismatch_kl: sampler_logprobs"),
        (
            "exact_kl(*(torch.zeros(2, n) for n in (4, 5)), torch.zeros(1).long())",
            "exact_kl: log_q",
        ),
        ("mismatch_kl(torch.zeros(3).long(), torch.zeros(3))", "mismatch_kl: logprobs"),
        ("LossInputs(*(torch.zeros(n) for n in (3, 4, 3)), torch.zeros(3).long())", "LossInputs"),
    ],
)
def test_a_tensor_of_another_shape_raises(statement: str, problem: str) -> None:
    done = run(statement)
    assert done.returncode != 0 and problem in done.stderr, done.stderr[-2000:]


def test_tensors_that_line_up_pass() -> None:
    done = run("ppo(LossInputs(*(torch.zeros(3),) * 3, torch.zeros(3).long()))")
    assert done.returncode == 0, done.stderr[-2000:]
