"""`python -m benchmarks mismatch`: each kind of mismatch, and the tables and charts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks import mismatch as bench
from benchmarks.__main__ import main
from benchmarks.harness.mismatch_run import (
    Mismatch,
    RunRecord,
    StudyRun,
    StudySize,
    load_correction,
)
from benchmarks.mismatch import Result
from sightline.algo.losses import LossInputs
from sightline.errors import ConfigError
from sightline.wire.file import append_line
from tests.read_back import read_weights

SMALL = StudySize(steps=4, groups=2, group_size=2, eval_tasks=2, gradient_every=4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_lag_samples_from_the_older_version(tiny_model: Path, tmp_path: Path) -> None:
    run = StudyRun(tiny_model, tmp_path, SMALL, Mismatch(lag=2), "tis", seed=0)
    record, advantages = RunRecord(), []
    try:
        for step in range(1, SMALL.steps + 1):
            traces = run.sample(step)
            [version] = {version for trace in traces for version, _ in trace.policies}
            assert version == max(0, step - 1 - 2)
            served = dict(run.sampler.engine.runner.forward.model.named_parameters())
            published = read_weights(run.versions.paths[version])[1]
            assert all(torch.equal(served[name], published[name]) for name in published)
            for i, trace in enumerate(traces):
                trace.per_turn = [float(i % 2)]  # random weights earn nothing to learn from
            advantages.append(run.train(step, traces, record))
    finally:
        run.close()
    assert (
        advantages[0] < 1e-6 < min(advantages[1:])
    )  # the first step is on-policy, the others are not
    # Importance sampling corrects a lag, as long as no ratio reaches the cap.
    assert record.cosines == [pytest.approx(1.0, abs=1e-3)]


def test_stale_features_come_from_the_previous_tower(tiny_model: Path, tmp_path: Path) -> None:
    run = StudyRun(tiny_model, tmp_path, SMALL, Mismatch(stale_features=1), "none", seed=0)
    model = run.learner.forward.model
    tower = {name for name, _ in run.learner.forward.vision_parameters()}
    try:
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
            run.versions.publish()
        first, second, third = (read_weights(path)[1] for path in run.versions.paths)
        for name, parameter in model.named_parameters():
            assert torch.equal(third[name], parameter) == (name not in tower), name
            assert torch.equal(second[name], first[name]) == (name in tower), name
        run.sampler.engine.adopt(run.versions.paths[2])
        patches, grid = run.learner.forward.blank_image() or pytest.fail("a tower")
        with torch.no_grad():
            stale = run.sampler.engine.runner.forward.encode(patches, [grid])
            assert not torch.allclose(stale, run.learner.forward.encode(patches, [grid]))
            for name, parameter in run.learner.forward.vision_parameters():
                parameter.copy_(third[name])
            assert torch.allclose(stale, run.learner.forward.encode(patches, [grid]), atol=1e-5)
    finally:
        run.close()


@pytest.mark.parametrize("name", bench.CORRECTIONS)
def test_corrections_equal_the_policy_gradient_without_mismatch(name: str) -> None:
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 0.25, -2.0])
    inputs = LossInputs(logprobs, logprobs.detach(), advantages, torch.tensor([0, 0, 1, 1]))
    token_loss, clipped = load_correction(name)(inputs)
    [gradient] = torch.autograd.grad(token_loss.sum(), logprobs)
    assert torch.equal(gradient, -advantages) and not clipped.any()


def build_result(condition: str, correction: str, seed: int, level: float) -> Result:
    rewards = [min(level, 0.1 * step) for step in range(1, 21)]
    record = RunRecord(rewards, level, 0.01, 0.2, [level, level], [0.5, 0.7], 3.0)
    return Result(condition, correction, seed, StudySize(), record)


def test_results_become_tables_and_charts() -> None:
    results = [build_result("exact", "none", seed, 1.0) for seed in (0, 1)]
    for correction, level in (("none", 0.5), ("ppo", 0.95)):
        results += [
            build_result(condition, correction, seed, level + 0.04 * seed)
            for condition in ("lag=1", "lag=8", "noise=0.3")
            for seed in (0, 1)
        ]
    last, _, held_out, steps, cosine, *_, differences, runs = bench.format_tables(results)
    assert "| `exact` | 1.000 (1.000–1.000) | – |" in last
    assert "| `lag=8` | 0.520 (0.500–0.540) | 0.970 (0.950–0.990) |" in held_out
    assert "| `lag=8` | never | 11.0 (11.0–11.0) |" in steps
    assert "| `noise=0.3` | 0.520 (0.500–0.540) | 0.970 (0.950–0.990) |" in cosine
    assert "| `lag=1` | 0.01 | 4 | 3.0 |" in runs
    assert re.search(r"\| lag \| -0\.\d\d ± 0\.\d\d \(4\) \| [+-]0\.\d\d ± ", differences)
    [same] = {
        v
        for line in differences.splitlines()
        if "noise" in line
        for v in re.findall(r"\((\d)\)", line)
    }
    assert same == "2", "one run a seed"
    assert bench.format_range([3.0, math.inf, 5.0], 0) == "4 (3–5), 1 never"
    charts = dict(bench.draw_charts(results))
    kinds = {
        f"mismatch_{k}_{m}" for k in ("lag", "noise") for m in ("reward", "gradient", "curves")
    }
    assert charts.keys() == kinds
    assert all(picture.startswith("<svg") for picture in charts.values())
    # A bar from the lowest to the highest seed at every level of both corrections.
    assert charts["mismatch_lag_reward"].count('opacity=".6"') == 2 * 3


def test_interrupted_study_resumes(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = StudySize(steps=1, groups=1, group_size=2, eval_tasks=1, gradient_every=1)
    done = msgspec.structs.replace(build_result("noise=1", "none", 0, 0.5), size=size)
    append_line(tmp_path / bench.RESULTS, msgspec.json.encode(done))
    words = [
        "mismatch", "--steps", "1", "--groups", "1", "--group-size", "2", "--eval-tasks",
        "1", "--gradient-every", "1", "--seeds", "1", "--conditions", "noise=1", "--corrections",
        "none", "ppo", "--device", "cpu", "--model", str(tiny_model), "--out", str(tmp_path),
        "--plot", str(tmp_path / "charts"),
    ]  # fmt: skip
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "1/1 noise=1, ppo, seed 0" in output and "noise=1, none" not in output
    assert len(bench.read_results(tmp_path / bench.RESULTS, size)) == 2
    assert (tmp_path / "charts" / "mismatch_noise_reward.svg").is_file()
    with pytest.raises(ConfigError, match="a different size"):
        bench.read_results(tmp_path / bench.RESULTS, StudySize())
