"""`sightline bisect` names the first difference of two runs, and its cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from synthetic_run import SyntheticSize, write_synthetic_run

from sightline.cli.main import main
from sightline.message import user
from sightline.run import RunDir
from sightline.trace import Node, Trace, read_traces, write_traces
from sightline.view.bisect import Bisection, bisect_runs
from sightline.wire.array import Array
from sightline.wire.file import add_checksum
from sightline.wire.micro_batch import StepScores
from sightline.wire.weights import HISTORY, HistoryLine

SIZE = SyntheticSize(steps=3, rollouts_per_step=12, images=4, conversations=4, group_size=4)
STEP, TRACE = 2, "g4.1"
Runs = tuple[RunDir, RunDir]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Two equal runs."""
    first = write_synthetic_run(tmp_path / "a", SIZE)
    config = first.config.read_text() + "\n[orchestrator]\nmax_lag = 0\n"
    first.config.write_text(config)
    for version in (1, 2, 3):
        write_version(first, version, f"{version}" * 64)
    shutil.copytree(first.path, tmp_path / "b")
    return first, RunDir(tmp_path / "b")


def write_version(run_dir: RunDir, version: int, sha256: str) -> None:
    line = add_checksum(msgspec.json.encode(HistoryLine(version, 0, sha256)))
    with (run_dir.weights / HISTORY).open("ab") as file:
        file.write(line + b"\n")


def edit(run_dir: RunDir, change: Callable[[Trace], None]) -> None:
    """Change one trace of step 2, and a trace of step 3, which is not the first difference."""
    for step, name in ((STEP, TRACE), (3, "g6.0")):
        traces = list(read_traces(run_dir.traces_of(step)))
        change(next(trace for trace in traces if trace.id == name))
        write_traces(run_dir.traces_of(step), traces)


def edit_node(number: int, change: Callable[[Node], dict[str, Any]]) -> Callable[[Trace], None]:
    def apply(trace: Trace) -> None:
        trace.nodes[number] = replace(trace.nodes[number], **change(trace.nodes[number]))

    return apply


def replace_item(node: Node, **values: Any) -> dict[str, Any]:
    slot = node.slots[0]
    return {"slots": (replace(slot, item=replace(slot.item, **values)), *node.slots[1:])}


def replace_at(array: Array, at: int, value: float) -> Array:
    values = array.numpy().copy()
    values[at] = value
    return Array.of(values, array.dtype)


def check(found: Bisection, cause: str, what: str, token: int | None) -> None:
    assert found.difference is not None
    assert found.cause == cause and found.difference.what.startswith(what)
    assert (found.difference.step, found.difference.trace) == (STEP, TRACE)
    assert found.difference.token == token


def test_equal_runs_have_no_difference(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", *(str(run_dir.path) for run_dir in runs)]) == 0
    assert capsys.readouterr().out == "no difference in 3 steps\n"


CHANGES = {
    "data, message": (0, lambda node: {"message": user("other")}, "message", 0),
    "data, prompt token": (
        0, lambda node: {"token_ids": replace_at(node.token_ids, -2, 7)}, "prompt token", -2,
    ),
    "pixels, filter": (
        0, lambda node: replace_item(node, fingerprint="bilinear"), "fingerprint of image", 1,
    ),
    "pixels, digest": (
        0, lambda node: {"slots": (replace(node.slots[0], pixel_digest="f" * 32),)},
        "pixel_digest of image", 1,
    ),
    "kernels, logprob": (
        1, lambda node: {"logprobs": replace_at(node.logprobs, 3, -0.25)}, "logprob of token", 4,
    ),
    "kernels, token": (
        1, lambda node: {"token_ids": replace_at(node.token_ids, 6, 1)}, "sampled token", 6,
    ),
    "weights": (
        1, lambda node: {"versions": (replace(node.versions[0], version=9),)}, "policy", 1,
    ),
}  # fmt: skip
"""Node, its change, what differs, and the token's index in its node."""


@pytest.mark.parametrize("name", CHANGES)
def test_planted_difference_is_found(runs: Runs, name: str) -> None:
    number, change, what, at = CHANGES[name]
    edit(runs[1], edit_node(number, change))
    [trace] = [trace for trace in read_traces(runs[0].traces_of(STEP)) if trace.id == TRACE]
    prompt = len(trace.nodes[0].token_ids)
    token = at + prompt if number == 1 or at < 0 else at
    check(bisect_runs(*runs), name.partition(",")[0], what, token)


def test_another_vision_tower_and_another_seed_are_told_apart(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    def sample_otherwise(trace: Trace) -> None:
        edit_node(1, lambda node: {"token_ids": replace_at(node.token_ids, 6, 1)})(trace)

    def change_seed(trace: Trace) -> None:
        trace.seed += 1
        sample_otherwise(trace)

    before = runs[1].traces_of(STEP).read_bytes()
    edit(runs[1], change_seed)
    found = bisect_runs(*runs)
    assert found.difference is not None and found.difference.values == (0, 1)
    assert found.cause == "sampling seed"
    runs[1].traces_of(STEP).write_bytes(before)
    edit(runs[1], sample_otherwise)
    for run_dir, digest in zip(runs, "ab", strict=True):  # of a checkpoint with another tower
        run_dir.model_digests.write_text(json.dumps({"model.safetensors": digest}))
    assert bisect_runs(*runs).cause == "weights"
    assert main(["bisect", *(str(run_dir.path) for run_dir in runs)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"first difference: step 2, trace {TRACE}, token ")
    assert lines[1].startswith(f"  {runs[0].path}: ") and lines[2] == f"  {runs[1].path}: 1"
    assert lines[3] == "cause: weights: the inputs are equal, but the weights differ"


def test_differences_of_the_trainer_are_found(runs: Runs) -> None:
    file = runs[1].scores_of(STEP)
    scores = StepScores.from_bytes(file.read_bytes())
    origin = next(o for o in scores.origins if o.trace_id == TRACE and o.node == 1)
    logprobs = replace_at(scores.logprobs, origin.start + 2, -9.0)
    file.write_bytes(replace(scores, logprobs=logprobs).to_bytes())
    [trace] = [trace for trace in read_traces(runs[0].traces_of(STEP)) if trace.id == TRACE]
    check(bisect_runs(*runs), "kernels", "the trainer's logprob", len(trace.nodes[0].token_ids) + 3)


def test_settings_explain_other_weights(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    (runs[1].weights / HISTORY).unlink()
    for version, digit in ((1, "1"), (2, "5"), (3, "6")):
        write_version(runs[1], version, digit * 64)
    found = bisect_runs(*runs)
    assert found.difference is not None and found.cause == "kernels"
    assert found.difference.values == ("2" * 64, "5" * 64) and found.difference.step == 2
    config = runs[1].config.read_text()
    config = config.replace("lr = 1e-6", "lr = 2e-6").replace('"synthetic"', '"other"')
    runs[1].config.write_text(config.replace("checkpoint", "elsewhere"))
    assert main(["bisect", *(str(run_dir.path) for run_dir in runs)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "cause: settings: the run files differ (trainer.lr = 1e-06 and 2e-06)"
    )


def test_missing_rollout_and_other_reward_are_data(runs: Runs) -> None:
    traces = list(read_traces(runs[1].traces_of(STEP)))
    write_traces(runs[1].traces_of(STEP), [trace for trace in traces if trace.id != TRACE])
    check(bisect_runs(*runs), "data", "the rollout is played", None)
    next(trace for trace in traces if trace.id == TRACE).reward = np.pi
    write_traces(runs[1].traces_of(STEP), traces)
    check(bisect_runs(*runs), "data", "reward", None)


def test_runs_with_lag_and_supervised_runs_are_refused(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bisect", *(str(run_dir.path) for run_dir in runs)]
    config = runs[1].config.read_text()
    runs[1].config.write_text(config.replace("max_lag = 0", "max_lag = 2"))
    assert main(words) == 2
    assert "max_lag = 2: which version samples a rollout" in capsys.readouterr().err
    runs[1].config.write_text(f"{config}\n[sft]\n")
    assert main(words) == 2
    assert "is a supervised run" in capsys.readouterr().err
