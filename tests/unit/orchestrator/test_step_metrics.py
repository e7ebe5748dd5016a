"""The loop's counters in metrics.jsonl, over the whole run and across a restart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from sightline.algo.verdicts import GroupVerdict
from sightline.cli.main import main
from sightline.media import MediaStore
from sightline.orchestrator.loop import Orchestrator
from sightline.orchestrator.rollout_scheduler import Group
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.step_metrics import StepCollection, StepMetrics
from sightline.orchestrator.task_order import TaskOrder
from sightline.run import EventLog, RunDir
from sightline.trace import decode_trace, encode_trace, read_traces
from sightline.view.events import read_events
from sightline.view.summary import build_summary
from sightline.wire.control import RolloutRequest, RolloutResult
from sightline.wire.event import STEP_METRICS
from sightline.wire.file import read_lines
from tests.unit.orchestrator.test_loop import World, play

NUM_ROLLOUTS = 6
"""Rollouts of one step of `World`."""


class Forking(World):
    """Every rollout edits its history once, and sends one refused request."""

    def build_result(self, play: RolloutRequest, version: int) -> RolloutResult:
        result = super().build_result(play, version)
        trace = decode_trace(result.trace)
        trace.forks = {"diverged": 1, "tools_changed": 2}
        trace.refused_requests = ["MediaRefused: messages[0].content[0].image_url.url: no image"]
        return replace(result, trace=encode_trace(trace))

    def build(self, **changes: int) -> Orchestrator:
        orchestrator = super().build(**changes)
        orchestrator.observer = StepMetrics(
            run_state=self.run_state,
            policy=self.policy,
            store=MediaStore(self.run_dir.media),
            events=EventLog(self.run_dir.metrics, "orchestrator"),
            rollouts=self.rollouts,
            steps_total=9,
        )
        return orchestrator


class Breaking(Forking):
    """The first rollout fails after it has earned a reward."""

    def build_result(self, play: RolloutRequest, version: int) -> RolloutResult:
        result = super().build_result(play, version)
        trace = decode_trace(result.trace)
        if trace.id == "g0.0":
            trace.reward, trace.error = 7.0, "the browser crashed"
        return replace(result, trace=encode_trace(trace))


def test_reward_of_a_step_leaves_out_failed_rollouts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    play(Breaking(run_dir, max_lag=0), range(1, 2))
    (values,) = (e.values for e in read_events(run_dir.metrics) if e.kind == "step")
    assert values["broken"] == 1 and values["groups"] == 3, "its group was replaced"
    assert values["reward"] == pytest.approx(4 / 7)


def test_group_of_two_versions_is_not_fresh() -> None:
    """The mismatch is measured on tokens that the newest version has sampled."""
    collection = StepCollection()
    for lags, is_fresh in (([0, 1], False), ([0, 0], True), ([1], True)):
        collection.add(Group(0, 0), GroupVerdict([], [], lags, True, True), 0)
        assert collection.has_fresh_group == is_fresh


def test_metrics_count_forked_turns_by_reason_and_refusals(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    play(Forking(run_dir, max_lag=0), range(1, 3))
    again = Forking(run_dir, max_lag=0)
    again.policy.version = 2
    play(again, range(3, 4))
    steps = [event for event in read_events(run_dir.metrics) if event.kind == "step"]
    assert [event.values["forks"] for event in steps] == [
        {"diverged": NUM_ROLLOUTS * k, "tools_changed": 2 * NUM_ROLLOUTS * k} for k in (1, 2, 3)
    ]
    assert [event.values["door_errors"] for event in steps] == [6, 12, 18]
    lines = [json.loads(line) for line in read_lines(run_dir.verdicts)]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        ids = sorted(name for names in line["verdicts"].values() for name in names)
        assert ids == sorted(t.id for t in read_traces(run_dir.traces_of(line["step"])))
    assert RunState.open(run_dir).progress.forks == steps[-1].values["forks"]
    summary = build_summary(read_events(run_dir.metrics))
    assert summary["forks"] == {"diverged": 18, "tools_changed": 36}
    assert summary["door_errors"] == 18


def test_tasks_set_aside_are_counted_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    run_dir.config.touch()
    world = Forking(run_dir, max_lag=0)
    records = world.run_state.progress.tasks
    world.task_order = TaskOrder(lambda group, *_: 40 + group % 3, 0, records, lambda: 0.0)
    world.rollouts.choose_task = world.task_order.choose
    task_of = {f"g{group}": 40 + group % 3 for group in range(12)}
    rewards = {40: (0.0, 1.0), 41: (0.25, 0.25), 42: (1.0, 1.0)}
    world.reward_of = lambda play: rewards[task_of[play.group_id]][int(play.rollout_id[-1])]
    play(world, range(1, 5))
    events = list(read_events(run_dir.metrics))
    steps = [event for event in events if event.kind == "step"]
    assert [event.values["tasks_set_aside"] for event in steps] == [0, 0, 2, 2]
    words = [event.values["words"] for event in events if "task_set_aside" in event.values]
    assert sorted(words) == [
        f"task {task} is set aside: none of its groups had a signal. Its mean reward is {reward}"
        for task, reward in ((41, 0.25), (42, 1))
    ]
    assert main(["status", str(run_dir.path)]) == 0
    assert re.search("set aside +2 tasks without signal: 4[12], 4[12] *\n", capsys.readouterr().out)


def test_every_step_has_the_expected_metrics(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    play(Forking(run_dir, max_lag=0), range(1, 3))
    first, second = (e.values for e in read_events(run_dir.metrics) if e.kind == "step")
    assert first.keys() <= STEP_METRICS
    # Each rollout has one turn with one sampled token. Of two in a group one earns 1.
    assert (first["answer_tokens_mean"], first["answer_tokens_max"], first["turns_mean"]) == (
        1,
        1,
        1,
    )
    assert first["reward_std"] == first["reward_group_std"] == 0.5
    assert first["truncated_rate"] == first["broken_rate"] == first["no_signal_rate"] == 0
    assert [v["tokens_sampled_total"] for v in (first, second)] == [6, 12]
    assert [v["tokens_trained_total"] for v in (first, second)] == [6, 12]
    assert 0 < first["seconds_total"] <= second["seconds_total"]
    assert all(0 < v["rollout_wait_s"] <= v["seconds"] for v in (first, second))
