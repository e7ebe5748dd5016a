"""The loop with real components and a scripted worker: lag, room, empty batches, progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from sightline.algo.algorithms import GRPO
from sightline.algo.verdicts import GroupFilter, GroupVerdict
from sightline.config import AlgorithmConfig
from sightline.config.sections import EnvMixEntry, OrchestratorConfig
from sightline.errors import DiskFull, MediaError, NoTrainableSamples
from sightline.media.stored_file import open_blobs
from sightline.message import assistant, user
from sightline.orchestrator.evaluator import STEPS_BETWEEN, Evaluator, RewardGoal
from sightline.orchestrator.loop import Orchestrator
from sightline.orchestrator.policies import PolicyUpdater, PublishedPolicies
from sightline.orchestrator.replay import ReplayBuffer
from sightline.orchestrator.rollout_scheduler import RolloutDispatcher, RolloutScheduler
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.step_metrics import StepCollection
from sightline.orchestrator.task_order import TaskOrder, sequential
from sightline.orchestrator.teacher import ServedTeacher
from sightline.run import EventLog, RunDir
from sightline.trace import Node, PolicySpan, Trace, encode_trace
from sightline.trace.node import float32_array, int32_array
from sightline.view.events import read_events
from sightline.wire.array import Array
from sightline.wire.control import (
    BatchReady,
    CancelRollouts,
    ControlMessage,
    PublishedWeights,
    RolloutRequest,
    RolloutResult,
)
from sightline.wire.sample import Batch, Sample


class World:
    """A worker that answers at once with the engine's version, and a trainer with a delay."""

    def __init__(self, run_dir: RunDir, max_lag: int, train_after: int = 0) -> None:
        self.run_dir, self.max_lag, self.train_after = run_dir, max_lag, train_after
        self.announced: list[BatchReady] = []
        self.algorithm = GRPO(AlgorithmConfig())
        self.played: list[RolloutRequest] = []
        self.in_flight = 0
        self.reward_of = lambda play: float(int(play.rollout_id.split(".")[1]) % 2)
        self.lags: list[int] = []
        self.error = self.error_kind = self.limit = ""
        self.always_version: int | None = None
        self.goal: RewardGoal | None = None
        self.check_room: Callable[[], None] = lambda: None
        self.slow_group = ""
        self.run_state = RunState.open(run_dir)
        events = EventLog(run_dir.metrics, "orchestrator")
        self.policy = PolicyUpdater(
            events, [self.adopt], run_dir.weights, open_blobs(run_dir.media)
        )
        self.task_order = TaskOrder(sequential, 0, {}, lambda: 0.0)
        self.replay = ReplayBuffer()
        self.teacher: ServedTeacher | None = None
        self.rollouts = RolloutScheduler(
            RolloutDispatcher(self.send, ["w"]), group_size=2, temperature=1.0, seed=0,
            next_group=self.run_state.progress.next_group,
            undecided_groups={g: g for g in self.run_state.progress.open_groups},
        )  # fmt: skip

    def build(self, **changes: int) -> Orchestrator:
        events = EventLog(self.run_dir.metrics, "orchestrator")
        return Orchestrator(
            rollouts=self.rollouts,
            policy=self.policy,
            policies=PublishedPolicies("", self.run_dir.weights, owns_servers=True),
            group_filter=GroupFilter(self.max_lag, self.algorithm, []),
            task_order=self.task_order,
            replay=self.replay,
            teacher=self.teacher,
            run_state=self.run_state,
            observer=self,
            evaluator=Evaluator(self.rollouts, self.run_state, events, self.run_dir, 0, 1.0),
            background_evaluator=None,
            goal=self.goal,
            announce=self.announce,
            check_room=lambda: self.check_room(),
            settings=OrchestratorConfig(
                groups_per_step=3,
                max_lag=self.max_lag,
                diagnostics_every=changes.get("diagnostics_every", 0),
                max_empty_batches=2,
                max_resample_fraction=changes.get("max_resampled_groups", 0) / 3,
            ),
            max_bad_fraction=0.0,
            last_step=changes.get("last_step", 1000),
        )

    async def send(self, peer: str, message: ControlMessage) -> None:
        if isinstance(message, CancelRollouts):
            return
        assert isinstance(message, RolloutRequest)
        self.played.append(message)
        version = self.policy.version if self.always_version is None else self.always_version

        def answer() -> None:
            self.rollouts.on_result(self.build_result(message, version))

        delay = 0.001 + 0.05 * (message.group_id == self.slow_group)
        asyncio.get_running_loop().call_later(delay, answer)

    def build_result(self, play: RolloutRequest, version: int) -> RolloutResult:
        nodes = [
            Node(0, -1, user("q"), int32_array([1, 2]), sampled_start=2),
            Node(
                1, 0, assistant("a"), int32_array([3, 4]), sampled_start=1,
                logprobs=float32_array([-1.0]),
                versions=(PolicySpan(0, 1, version=version, epoch=0),),
                finish_reason="stop",
            ),
        ]  # fmt: skip
        trace = Trace(id=play.rollout_id, group_id=play.group_id, nodes=nodes)
        trace.reward = None if self.error else self.reward_of(play)
        trace.per_turn = [float(int(play.rollout_id.split(".")[1]))]
        trace.error, trace.error_kind = self.error, self.error_kind
        if self.limit:
            trace.truncated, trace.limit, trace.error_kind = True, self.limit, "truncated"
            trace.reward = 0.0
        return RolloutResult(play.rollout_id, encode_trace(trace))

    async def announce(self, ready: BatchReady) -> None:
        written = self.run_state.run_dir.batch(ready.step).read_bytes()
        assert written == ready.data, "a batch is on disk before it is announced"
        self.announced.append(ready)
        delay = 0.001 * self.train_after
        news = PublishedWeights(ready.step, 0, "m", {}, 0)
        asyncio.get_running_loop().call_later(delay, self.policy.publish, news)

    async def adopt(self, manifest: str) -> None:
        await asyncio.sleep(0.001)

    def on_group(self, step: int, verdict: GroupVerdict) -> None:
        self.lags += verdict.lags

    def on_step(self, step: int, collection: StepCollection) -> None:
        pass


def play(world: World, steps: range, **changes: int) -> int:
    async def both() -> int:
        adopting = asyncio.ensure_future(world.policy.keep_adopting())
        sending = asyncio.ensure_future(world.rollouts.dispatcher.keep_sending())
        try:
            return await world.build(**changes).train(steps)
        finally:
            adopting.cancel()
            sending.cancel()

    return asyncio.run(both())


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    new_run_dir = RunDir(tmp_path / "run")
    new_run_dir.make()
    return new_run_dir


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_no_sample_is_older_than_the_bound(run_dir: RunDir, max_lag: int) -> None:
    world = World(run_dir, max_lag, train_after=5)
    play(world, range(1, 9))
    assert [a.step for a in world.announced] == list(range(1, 9))
    assert max(world.lags) <= max_lag
    if max_lag:
        assert max(world.lags) == max_lag, "rollouts run ahead as far as they may"


def test_no_rollout_is_wasted_without_lag(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    play(world, range(1, 5))
    assert len(world.played) == 4 * 3 * 2
    assert set(world.run_state.verdicts) <= {"train"}


def test_a_batch_does_not_depend_on_the_order_of_arrival(tmp_path: Path) -> None:
    batches = []
    for slow_group in ("g0", "g2"):
        run_dir = RunDir(tmp_path / slow_group)
        run_dir.make()
        world = World(run_dir, max_lag=0)
        world.slow_group = slow_group
        play(world, range(1, 2))
        assert world.run_state.progress.step == 1 and len(world.played) == 6
        batches.append(run_dir.batch(1).read_bytes())
    assert batches[0] == batches[1]


def test_rollouts_too_late_to_train_are_not_played(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=2, train_after=5)
    play(world, range(1, 6), last_step=5)
    assert len(world.played) == 5 * 3 * 2


@pytest.mark.parametrize(("max_lag", "most"), [(0, 3), (1, 3), (2, 6)])
def test_groups_in_flight_are_bounded_to_keep_steps_even(
    run_dir: RunDir, max_lag: int, most: int
) -> None:
    world = World(run_dir, max_lag, train_after=5)
    ahead: list[int] = []
    send = world.send

    async def count(peer: str, message: ControlMessage) -> None:
        ahead.append(world.rollouts.num_ahead)
        await send(peer, message)

    world.rollouts.dispatcher.send = count
    play(world, range(1, 9))
    assert max(ahead) == most


def test_a_diagnostics_step_waits_for_a_fresh_group(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=1, train_after=5)
    fresh_at: list[int] = []
    world.on_step = lambda step, c: fresh_at.append(step) if c.has_fresh_group else None  # type: ignore
    play(world, range(1, 10), diagnostics_every=3)
    assert {3, 6, 9} <= set(fresh_at)


def test_consecutive_batches_without_trainable_samples_end_the_run(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    world.reward_of = lambda play: 0.5
    with pytest.raises(NoTrainableSamples, match="2 batches in a row"):
        play(world, range(1, 3))


def test_a_batch_without_signal_trains_on_its_kl_term(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    world.algorithm = GRPO(AlgorithmConfig(kl_coef=0.1))
    world.reward_of = lambda play: 1.0
    play(world, range(1, 4))
    assert [a.step for a in world.announced] == [1, 2, 3]


def test_broken_groups_end_the_run_with_the_last_error(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    world.error = "boom: no such level"
    with pytest.raises(NoTrainableSamples, match="6 groups in a row were dropped.*no such level"):
        play(world, range(1, 3))


def test_groups_that_a_full_disk_broke_are_played_again(run_dir: RunDir) -> None:
    """The group fails because a worker cannot store an image. The environment is not at fault."""
    world = World(run_dir, max_lag=0)
    world.error = "no space left"

    def check_room() -> None:
        if world.played:
            raise DiskFull("the disk is full", "free space")

    world.check_room = check_room
    with pytest.raises(DiskFull):
        play(world, range(1, 3))
    again = World(run_dir, max_lag=0)
    play(again, range(1, 2))
    assert {request.group_id for request in world.played} == {
        request.group_id for request in again.played
    }


def test_diagnostics_wait_for_a_fresh_group_is_bounded(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=1, train_after=5)
    world.always_version = 0
    play(world, range(1, 3), diagnostics_every=2)
    assert [a.step for a in world.announced] == [1, 2]


@pytest.mark.parametrize("kind", ["media_missing", "PixelMismatch"])
def test_too_much_bad_media_ends_the_run_before_the_batch_is_written(
    run_dir: RunDir, kind: str
) -> None:
    world = World(run_dir, max_lag=0)
    breaks = iter([True])
    build = world.build_result

    def build_result(play: RolloutRequest, version: int) -> RolloutResult:
        broken = next(breaks, False)
        world.error, world.error_kind = ("no such image", kind) if broken else ("", "")
        return build(play, version)

    world.build_result = build_result  # type: ignore[method-assign]
    with pytest.raises(MediaError, match=r"broke 1 of 8 .*max_bad_fraction = 0.0.*no such image"):
        play(world, range(1, 3))
    assert not world.announced and not run_dir.verdicts.exists()


def test_open_groups_are_played_again_after_a_restart(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=2, train_after=20)
    play(world, range(1, 3))
    progress = RunState.open(run_dir).progress
    assert progress.step == 2 and progress.open_groups
    again = World(run_dir, max_lag=2)
    again.policy.version = 2
    play(again, range(3, 4))
    first = [int(p.group_id[1:]) for p in again.played[: 2 * len(progress.open_groups) : 2]]
    assert first == progress.open_groups
    trained = {p.group_id for p in world.played} | {p.group_id for p in again.played}
    assert trained == {f"g{i}" for i in range(len(trained))}, "no task is skipped"
    assert RunState.open(run_dir).progress.verdicts == {"train": 18}, "of all three steps"


def test_rewards_of_tasks_are_recorded_and_resumed_with_the_tasks_of_open_groups(
    run_dir: RunDir,
) -> None:
    world = World(run_dir, max_lag=2, train_after=20)
    records = world.run_state.progress.tasks
    world.task_order = TaskOrder(lambda group, *_: 100 + group % 4, 0, records, lambda: 0.0)
    world.rollouts.choose_task = world.task_order.choose
    play(world, range(1, 3))
    progress = RunState.open(run_dir).progress
    assert sum(record.groups for record in progress.tasks.values()) == 6
    assert {record.reward for record in progress.tasks.values()} == {0.5}
    assert set(progress.tasks) <= {100, 101, 102, 103}
    assert progress.open_tasks == {group: 100 + group % 4 for group in progress.open_groups}
    assert {p.task for p in world.played} == {100, 101, 102, 103}


def test_task_whose_turns_differ_is_not_set_aside(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    world.algorithm = GRPO(AlgorithmConfig(credit="turn"))
    world.reward_of = lambda play: 0.5
    records = world.run_state.progress.tasks
    world.task_order = TaskOrder(lambda *_: 7, 0, records, lambda: 0.0)
    world.rollouts.choose_task = world.task_order.choose
    play(world, range(1, 3))
    assert records[7].groups == records[7].with_signal == 6 and not records[7].is_set_aside
    assert records[7].spread == 0


def test_resumed_mix_skips_no_task_of_a_member(run_dir: RunDir) -> None:
    numbers: dict[int, set[int]] = {0: set(), 1: set()}
    for steps in (range(1, 4), range(4, 7)):
        world = World(run_dir, max_lag=2, train_after=20)
        world.policy.version = steps.start - 1
        progress = world.run_state.progress
        mix = [EnvMixEntry(name="a"), EnvMixEntry(name="b", weight=2.0)]
        counts = dict(progress.mix_groups)
        world.task_order = TaskOrder(sequential, 0, {}, lambda: 0.0, mix, counts)
        world.rollouts.choose_task = world.task_order.choose
        open_tasks = {g: progress.open_tasks.get(g, g) for g in progress.open_groups}
        world.rollouts.undecided_groups = open_tasks
        play(world, steps)
        for request in world.played:
            numbers[request.task % 2].add(request.task // 2)
    assert sum(map(len, numbers.values())) == RunState.open(run_dir).progress.next_group
    assert all(tasks == set(range(len(tasks))) and tasks for tasks in numbers.values())


def test_unannounced_batch_is_rebuilt(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    play(world, range(1, 3))
    torn = run_dir.batch(3)
    torn.write_bytes(b"half")
    run_state = RunState.open(run_dir)
    assert not torn.exists()
    assert [a.step for a in run_state.announcements_after(0)] == [1, 2]


def without_signal_below(group: int, world: World) -> None:
    """Rewards that are equal in the first groups and differ in the later ones."""

    def reward(play: RolloutRequest) -> float:
        index = int(play.group_id[1:])
        return 0.5 if index < group else float(int(play.rollout_id.split(".")[1]) % 2)

    world.reward_of = reward


def seen(world: World) -> list[StepCollection]:
    steps: list[StepCollection] = []
    world.on_step = lambda step, collection: steps.append(collection)  # type: ignore[method-assign]
    return steps


def test_groups_without_signal_are_replaced(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    without_signal_below(2, world)
    steps = seen(world)
    play(world, range(1, 3), max_resampled_groups=3)
    assert len(steps[0].samples) == len(steps[1].samples) == 3 * 2, "every place trains"
    assert (steps[0].num_resampled, steps[0].num_without_signal, steps[0].num_decided) == (2, 2, 5)
    assert (steps[1].num_resampled, steps[1].num_decided) == (0, 3)


def test_replaced_groups_are_bounded(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    without_signal_below(3, world)
    steps = seen(world)
    play(world, range(1, 2), max_resampled_groups=1)
    assert (steps[0].num_resampled, steps[0].num_without_signal) == (1, 3)
    assert len(steps[0].samples) == 1 * 2, "two places are filled by groups without signal"


def test_groups_that_train_without_signal_are_not_replaced(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    without_signal_below(2, world)
    steps = seen(world)
    orchestrator = world.build(max_resampled_groups=3)
    orchestrator.group_filter.algorithm = GRPO(AlgorithmConfig(kl_coef=0.1))

    async def both() -> None:
        adopting = asyncio.ensure_future(world.policy.keep_adopting())
        try:
            await orchestrator.train(range(1, 2))
        finally:
            adopting.cancel()

    asyncio.run(both())
    assert (steps[0].num_resampled, steps[0].num_without_signal) == (0, 2)
    assert len(steps[0].samples) == 3 * 2


def set_goal(world: World, stop_at: float, tasks: int = 4) -> RewardGoal:
    events = EventLog(world.run_dir.metrics, "orchestrator")
    evaluator = Evaluator(world.rollouts, world.run_state, events, world.run_dir, tasks, 1.0)
    world.goal = RewardGoal(stop_at, evaluator, world.policy)
    return world.goal


def goal_events(run_dir: RunDir) -> list[tuple[int, float, bool]]:
    events = [event for event in read_events(run_dir.metrics) if event.kind == "goal"]
    return [(e.step, e.values["held_out"], e.values["is_reached"]) for e in events]


def test_run_ends_when_held_out_tasks_confirm_its_reward(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=1)
    goal = set_goal(world, stop_at=0.5)
    # A group has one rollout of 0 and one of 1: 0.5 in the mean. Held-out tasks earn less at first.
    world.reward_of = lambda play: (
        float(int(play.rollout_id.split(".")[1]) % 2)
        if play.split == "train"
        else float(world.policy.version > STEPS_BETWEEN)
    )
    assert play(world, range(1, 50)) == 1 + STEPS_BETWEEN
    assert goal_events(run_dir) == [(1, 0.0, False), (1 + STEPS_BETWEEN, 1.0, True)]
    assert goal.was_reached and RunState.open(run_dir).progress.goal_reached == 0.5


def test_run_with_perfect_reward_ends_before_its_batch_is_full(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    set_goal(world, stop_at=1.0)
    world.reward_of = lambda play: float(
        world.policy.version >= 2 or int(play.rollout_id.split(".")[1]) % 2
    )
    assert play(world, range(1, 50)) == 2, "step 3 has nothing to learn from"
    assert goal_events(run_dir) == [(2, 1.0, True)]


def test_truncated_rollouts_end_the_run_naming_their_limit(run_dir: RunDir) -> None:
    world = World(run_dir, max_lag=0)
    world.limit = "the prompt of turn 1 is too long"
    with pytest.raises(NoTrainableSamples, match="cut short: the prompt of turn 1") as caught:
        play(world, range(1, 3))
    assert "max_pixels" in caught.value.fix


def test_replayed_groups_are_young_and_the_same_after_a_resume(tmp_path: Path) -> None:
    """With covered batches removed, as after a checkpoint of every step."""

    def run(name: str, stop_at: int) -> list[Batch]:
        run_dir = RunDir(tmp_path / name)
        run_dir.make()
        announced = []
        for steps in (range(1, stop_at + 1), range(stop_at + 1, 9)):
            world = World(run_dir, max_lag=0)
            world.policy.version = steps.start - 1
            settings = OrchestratorConfig(replay_groups=2, replay_max_age=3)
            world.replay = ReplayBuffer.open(run_dir, settings, seed=0)
            play(world, steps)
            announced += world.announced
            world.run_state.remove_covered_batches(stop_at - world.replay.num_kept_steps)
        return [Batch.from_bytes(ready.data) for ready in announced]

    batches = run("whole", 8)
    first_step = {f"g{i}": 1 + i // 3 for i in range(24)}
    for batch in batches:
        ages = [batch.step - first_step[name] for name in batch.replayed]
        assert len(ages) == min(2, 3 * (batch.step - 1)) and all(0 < age <= 3 for age in ages)
        assert len(batch.samples) == 2 * (3 + len(ages))
    assert {b.step - first_step[name] for b in batches for name in b.replayed} == {1, 2, 3}
    assert run("resumed", 5) == batches


class _Constant(ServedTeacher):
    """A teacher whose logprobs are all -3."""

    async def _score(self, sample: Sample) -> Sample:
        await asyncio.sleep(0.002)
        logprobs = Array.of([-3.0] * len(sample.trained), "float32")
        return structs.replace(sample, teacher_logprobs=logprobs)


def test_teachers_logprobs_are_in_the_batch_before_it_is_announced(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.make()
    world = World(run_dir, max_lag=0)
    world.replay = ReplayBuffer(num_groups=1)
    world.teacher = _Constant(None, None, 0, world.run_state.progress)  # type: ignore[arg-type]
    play(world, range(1, 4))
    for ready in world.announced:
        assert run_dir.batch(ready.step).read_bytes() == ready.data
        for sample in Batch.from_bytes(ready.data).samples:
            assert sample.teacher_logprobs is not None
            assert sample.teacher_logprobs.numpy().tolist() == [-3.0] * len(sample.trained)
