"""The orchestrator that `build` makes of a run file has its settings, each seen by its effect."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from sightline.config import RunFile
from sightline.errors import DiskFull, MediaError, StoreFull
from sightline.media import MediaStore
from sightline.message import assistant, user
from sightline.orchestrator.build import build, build_servers
from sightline.orchestrator.loop import Orchestrator
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.step_metrics import StepCollection
from sightline.orchestrator.task_order import TaskRecord
from sightline.rollout.evaluation import derive_seed
from sightline.run import EventLog, RunDir
from sightline.trace import Node, PolicySpan, Trace, encode_trace
from sightline.trace.node import float32_array, int32_array
from sightline.wire.control import ControlMessage, RolloutRequest, RolloutResult

from .test_published_policies import ignore, publish

OPEN_GROUPS, NEXT_GROUP, SEED = [2, 5], 7, 11
SERVER = "http://127.0.0.1:9"


class Run:
    """The real orchestrator of a run that was stopped after two steps, and a scripted worker."""

    def __init__(self, path: Path, **sections: dict[str, Any]) -> None:
        run_dir = RunDir(path)
        run_dir.make()
        values: dict[str, Any] = {
            "model": {"path": "model"},
            "env": {"name": "color_codeword"},
            "run": {"steps": 4, "seed": SEED},
            "rollout": {"temperature": 0.7, "keep_truncated": False, "max_in_flight": 3},
            "eval": {"tasks": 1, "temperature": 0.3},
            "filters": {"max_sampled_tokens": 1},
            "orchestrator": {"group_size": 2, "groups_per_step": 2, "max_lag": 1},
            "media": {"max_bad_fraction": 0.5},
        }
        self.run_state = RunState.open(run_dir)
        progress = self.run_state.progress
        progress.step, progress.next_group, progress.open_groups = 2, NEXT_GROUP, OPEN_GROUPS
        progress.open_tasks, progress.mix_groups = {5: 77}, {0: 4, 1: 3}
        config = RunFile.model_validate(values | sections)
        self.store = MediaStore(run_dir.media)
        events = EventLog(run_dir.metrics, "orchestrator")
        pool = build_servers(config, run_dir, events, "secret", [SERVER])
        self.played: list[RolloutRequest] = []
        self.orchestrator: Orchestrator = build(
            config, run_dir, self.store, self.run_state, events, self.send, ignore, ["w"], pool,
            None,
        )  # fmt: skip

    async def send(self, worker: str, message: ControlMessage) -> None:
        assert isinstance(message, RolloutRequest)
        self.played.append(message)


def played(version: int = 3, epoch: int = 0, num_sampled: int = 1, **changes: Any) -> Trace:
    span = PolicySpan(0, num_sampled, version=version, epoch=epoch)
    nodes = [
        Node(0, -1, user("q"), int32_array([1, 2]), sampled_start=2),
        Node(
            1, 0, assistant("a"), int32_array([3] * num_sampled), sampled_start=0,
            logprobs=float32_array([-1.0] * num_sampled), versions=(span,), finish_reason="stop",
        ),
    ]  # fmt: skip
    return Trace(**{"id": "r", "nodes": nodes, "reward": 1.0} | changes)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_rollouts_are_requested_as_the_run_file_and_its_progress_say(run: Run) -> None:
    async def start() -> None:
        run.orchestrator.policy.version = 2
        waiting = asyncio.ensure_future(run.orchestrator._wait_for_group(3, StepCollection()))
        while len(run.played) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        waiting.cancel()
        rollouts = run.orchestrator.rollouts
        assert rollouts.dispatcher.num_in_flight == 3 and rollouts.dispatcher.num_waiting == 1
        await rollouts.start_groups(1)
        assert list(rollouts.open_groups) == [*OPEN_GROUPS, NEXT_GROUP], "interrupted ones first"

    asyncio.run(start())
    assert [request.rollout_id for request in run.played] == ["g2.0", "g2.1", "g5.0"]
    for request in run.played:
        assert request.temperature == 0.7 and request.min_version == 2
        assert request.seed == derive_seed(SEED, request.rollout_id)
    assert [request.task for request in run.played] == [2, 2, 77]


def test_tasks_are_chosen_as_the_run_file_and_its_progress_say(tmp_path: Path) -> None:
    args = {"num_tasks": 1000, "new_fraction": 0.0}
    sections = {"orchestrator": {"task_order": "difficulty", "task_order_args": args}}
    run = Run(tmp_path / "run", **sections)
    run.run_state.progress.tasks[400] = TaskRecord(4, 4, 0.5, 0.5)
    assert [run.orchestrator.rollouts.choose_task(group) for group in range(3)] == [400] * 3
    assert run.orchestrator.task_order.records is run.run_state.progress.tasks


def test_members_of_a_mix_continue_where_the_progress_ends(tmp_path: Path) -> None:
    mix = [{"name": "color_codeword"}, {"name": "color_codeword", "label": "b"}]
    order = Run(tmp_path / "run", env={"mix": mix}).orchestrator.task_order
    assert {order.choose(group) for group in range(7, 27)} == {
        *range(8, 8 + 2 * (order.mix_groups[0] - 4), 2),
        *range(7, 7 + 2 * (order.mix_groups[1] - 3), 2),
    }


def test_held_out_tasks_are_played_at_their_own_temperature(run: Run) -> None:
    async def evaluate() -> None:
        evaluating = asyncio.ensure_future(run.orchestrator.evaluator.evaluate("start", 0))
        while not run.played:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not evaluating.done()
        evaluating.cancel()

    asyncio.run(evaluate())
    assert [request.temperature for request in run.played] == [0.3]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "no_signal"),
        ({"version": 2}, "no_signal"),
        ({"version": 1}, "stale"),
        ({"num_sampled": 2}, "too_long"),
        ({"truncated": True, "error_kind": "truncated", "limit": "turns"}, "truncated"),
    ],
)
def test_verdicts_follow_the_run_file(run: Run, changes: dict[str, Any], verdict: str) -> None:
    trace = played(**changes)
    verdicts = run.orchestrator.group_filter.decide([trace, trace], step=4).verdicts
    assert [name for _, name in verdicts] == [verdict] * 2


def test_bad_media_above_the_fraction_ends_the_run(run: Run) -> None:
    bad = played(error="no such image", error_kind="media_missing")
    run.orchestrator._check_bad_media(StepCollection(traces=[bad, played()]))
    with pytest.raises(MediaError, match="max_bad_fraction = 0.5"):
        run.orchestrator._check_bad_media(StepCollection(traces=[bad, bad, played()]))


def test_no_group_starts_that_could_only_train_after_the_last_step(run: Run) -> None:
    run.orchestrator.policy.version = 3
    assert run.orchestrator._count_startable_groups(4, StepCollection()) == 2
    assert run.orchestrator._count_startable_groups(5, StepCollection()) == 0


def test_each_step_starts_only_with_room_for_its_files(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(worker: str, message: ControlMessage) -> None:
        raise AssertionError("a rollout was started")

    run.orchestrator.rollouts.dispatcher.send = refuse
    run.orchestrator.policy.version = 2
    run.store.max_bytes = 0
    run.store.put_bytes(b"x")
    with pytest.raises(StoreFull, match="its limit is 0"):
        asyncio.run(run.orchestrator.train(range(3, 4)))
    run.store.max_bytes, run.store.reserve_bytes = None, 0
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(DiskFull, match="has 0 bytes free"):
        asyncio.run(run.orchestrator.train(range(3, 4)))


def test_samples_of_a_version_that_was_made_again_are_stale(run: Run) -> None:
    orchestrator = run.orchestrator
    _, message = publish(orchestrator, 1)
    orchestrator.publish(message)
    assert orchestrator.group_filter.epochs == {1: 0}
    orchestrator.group_filter.epochs[1] = 1
    [(_, verdict)] = orchestrator.group_filter.decide([played(version=1)], step=2).verdicts
    assert verdict == "stale"


def test_published_version_removes_only_the_batches_that_its_checkpoint_covers(run: Run) -> None:
    orchestrator, run_dir = run.orchestrator, run.run_state.run_dir
    for step in (1, 2):
        run_dir.batch(step).write_bytes(b"")
    _, message = publish(orchestrator, 2, checkpoint_step=1)
    orchestrator.publish(message)
    assert [step for step, _ in run_dir.list_batches()] == [2]


def test_rollouts_of_unknown_weights_end_the_run(run: Run) -> None:
    asyncio.run(
        run.orchestrator.rollouts.dispatcher.submit(RolloutRequest("r", "g", 0, "train", 0, 1.0))
    )
    with pytest.raises(Exception, match="did not publish"):
        run.orchestrator.rollouts.on_result(RolloutResult("r", encode_trace(played(version=9))))


def test_a_reward_goal_ends_the_run_only_if_the_file_sets_one(tmp_path: Path, run: Run) -> None:
    assert run.orchestrator.goal is None
    aiming = Run(tmp_path / "aiming", run={"steps": 4, "stop_at": 0.9}, eval={"tasks": 0})
    assert aiming.orchestrator.goal is not None
    assert asyncio.run(aiming.orchestrator.goal.is_reached(0, [0.9])) is False
    assert asyncio.run(aiming.orchestrator.goal.is_reached(1, [0.8])) is False


def test_servers_of_other_owners_serve_only_after_adopting(tmp_path: Path) -> None:
    for servers, version in (([], 0), ([SERVER], -1)):
        inference = {"servers": servers, "outage_timeout_s": 7.0}
        run = Run(tmp_path / str(version), inference=inference)
        run_dir, config = run.run_state.run_dir, {"inference": inference}
        events = EventLog(run_dir.metrics, "orchestrator")
        values = {"model": {"path": "m"}, "env": {"name": "color_codeword"}, **config}
        pool = build_servers(RunFile.model_validate(values), run_dir, events, "s", [SERVER])
        assert pool.first_version == version and pool.outage_timeout_s == 7.0
