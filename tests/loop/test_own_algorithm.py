"""The demo, trained by functions and an algorithm from a module outside of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loop.conftest import SMALL
from loop.jobs import EXAMPLES, ROOT, sightline, summary
from sightline.run import RunDir
from sightline.view.dashboard.run_view import RunView
from sightline.wire.event import STEP_METRICS

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


def test_documented_algorithm_trains_and_its_metric_is_in_the_dashboard(home: Path) -> None:
    page = (ROOT / "docs" / "custom_algorithms.md").read_text()
    (home / "my_algo.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1])
    sightline(
        "rl", "--plain", EXAMPLES / "cpu.toml", *SMALL, "run.steps=3", "eval.every=0",
        "algorithm.name=my_algo:Reinforce", cwd=home,
    )  # fmt: skip
    [path] = (home / "runs").glob("job-*")
    view = RunView("run", RunDir(path))
    view.refresh_all()
    charts = view.history.since(0)
    view.close()
    assert charts["step"] == [1, 2, 3]
    first, *later = charts["columns"]["kl_tokens"]
    assert first == pytest.approx(0.0, abs=1e-5), "the policy starts as its reference"
    assert all(value is not None and abs(value) > abs(first) for value in later)
    assert {name.partition(".")[0] for name in charts["names"]} - STEP_METRICS == {"kl_tokens"}


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
