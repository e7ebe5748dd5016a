"""Shapes in annotations are checked where the tests run: a wrong one raises, by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, traceback
sys.path.insert(0, {tests!r})
from shape_checks import install
install({modules!r})
import torch
from sightline.algo.losses import LossInputs, exact_kl, mismatch_kl, ppo
for statement in {statements!r}:
    try:
        eval(statement)
        print("passed")
    except TypeError:
        print(traceback.format_exc().replace(chr(10), " "))
"""
WRONG = {
    "mismatch_kl(torch.zeros(3), torch.zeros(4))": "mismatch_kl: sampler_logprobs",
    "exact_kl(*(torch.zeros(2, n) for n in (4, 5)), torch.zeros(1).long())": "exact_kl: log_q",
    "mismatch_kl(torch.zeros(3).long(), torch.zeros(3))": "mismatch_kl: logprobs",
    "LossInputs(*(torch.zeros(n) for n in (3, 4, 3)), torch.zeros(3).long())": "LossInputs",
}
RIGHT = "ppo(LossInputs(*(torch.zeros(3),) * 3, torch.zeros(3).long()))"


def test_a_tensor_of_another_shape_raises_by_name() -> None:
    found = re.search(r"^SHAPED := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert found, "the Makefile says which modules are checked"
    program = PROGRAM.format(
        tests=str(ROOT / "tests"), modules=found[1].split(","), statements=[*WRONG, RIGHT]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *wrong, right = done.stdout.splitlines()
    assert right == "passed"
    for line, where in zip(wrong, WRONG.values(), strict=True):
        assert where in line
