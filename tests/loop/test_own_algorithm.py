"""The demo, trained by a loss, an advantage and a filter from a module outside of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.jobs import EXAMPLES, sightline, summary
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(900)]

MODULE = '''
import torch

from sightline.algo.losses import LossOutput


def reinforce(inputs, *, ratio_cap=4.0):
    """-sg(min(r, C)) A log pi, written anew."""
    weight = inputs.importance_ratios().detach().clamp(max=ratio_cap)
    token_loss = -weight * inputs.advantages * inputs.logprobs
    return LossOutput(token_loss, torch.zeros_like(token_loss))


def leave_one_out(rewards):
    """A = R minus the mean of the other rewards of the group."""
    others = (rewards.sum() - rewards) / max(len(rewards) - 1, 1)
    return rewards - others


def starts_with_a_space(trace):
    """Drops rollouts whose first answer begins with a blank."""
    return "leading_space" if trace.turns[0].message.text.startswith(" ") else None
'''


def test_user_defined_functions_train_the_demo(warm_home: Path) -> None:
    (warm_home / "my_algorithm.py").write_text(MODULE)
    done = sightline(
        "rl", "--plain", EXAMPLES / "cpu.toml", "run.name=own", "run.steps=40", "eval.tasks=128",
        "algorithm.loss=my_algorithm:reinforce", "algorithm.loss_args.ratio_cap=3.0",
        "algorithm.advantage=my_algorithm:leave_one_out",
        'filters.custom=["my_algorithm:starts_with_a_space"]',
        cwd=warm_home,
    )  # fmt: skip
    run = done.stdout.strip().splitlines()[-2].removeprefix("run: ")
    run_summary = summary(RunDir(warm_home / run))
    assert run_summary["reward_final"] > run_summary["reward_start"] + 0.15
    assert run_summary["mismatch_kl"] < 1e-5


def test_invalid_loss_is_refused_before_any_process_starts(warm_home: Path) -> None:
    broken = (
        "def constant(inputs):\n    return inputs.logprobs.detach(), inputs.logprobs.detach()\n"
    )
    (warm_home / "broken_algorithm.py").write_text(broken)
    done = sightline(
        "rl", "--plain", EXAMPLES / "cpu.toml", "run.name=refused",
        "algorithm.loss=broken_algorithm:constant", cwd=warm_home, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "[algorithm] loss" in done.stderr and "gradient" in done.stderr
    assert not list((warm_home / "runs").glob("refused-*"))
