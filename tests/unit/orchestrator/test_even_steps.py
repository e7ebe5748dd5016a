"""The rhythm of steps, on the real loop with a clock of its own: rollouts, training and the way of
a version to the engine take the seconds that a test says, on one device that they share or on two.

With `max_lag = 1` the rollouts of step k + 2 begin when version k is in use. So odd and even steps
are two chains, each a step of training, the version's way and the rollouts long; what keeps one
chain from following on the other's heels is that versions are in use at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from shards import take_first
from unit.orchestrator.test_loop import World

from sightline.run import RunDir
from sightline.wire.control import BatchReady, ControlMessage, PublishedWeights, RolloutRequest

STEPS, SETTLED = 12, 3
GROUPS = 3
"""Groups of a step, as `World` has them."""


class OwnClock(asyncio.SelectorEventLoop):
    """Time goes on to the next timer when nothing is to be done, and threads work at once."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def _run_once(self) -> None:
        waiting: Any = self
        if not waiting._ready and waiting._scheduled:
            self.now = max(self.now, waiting._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


@dataclass
class Device:
    """Sides that compute at the same time get an equal share of it, or one each if not `is_one`."""

    is_one: bool
    work: list[list[Any]] = field(default_factory=list)
    """Side, seconds that are left if it were alone, and what comes after it."""
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def add(self, side: str, seconds: float, then: Callable[[], None]) -> None:
        self._advance()
        self.work.append([side, seconds, then])
        self._plan()

    def _slowdown(self) -> int:
        return len({side for side, _, _ in self.work}) if self.is_one else 1

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        for one in self.work:
            one[1] -= (now - self.since) / self._slowdown()
        self.since = now

    def _plan(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.work:
            left = max(0.0, min(one[1] for one in self.work)) * self._slowdown()
            self.timer = asyncio.get_running_loop().call_later(left, self._end)

    def _end(self) -> None:
        self._advance()
        done = [one for one in self.work if one[1] < 1e-9]
        self.work = [one for one in self.work if one[1] >= 1e-9]
        for _, _, then in done:
            then()
        self._plan()


class TimedWorld(World):
    def __init__(
        self, run_dir: RunDir, train_s: float, rollout_s: float, in_use_s: float, spread: float
    ) -> None:
        super().__init__(run_dir, max_lag=1)
        self.train_s, self.rollout_s, self.in_use_s = train_s, rollout_s, in_use_s
        self.spread, self.draw = spread, random.Random(0)
        self.device = Device(is_one=True)
        self.ends: list[float] = []
        self.num_playing: list[tuple[float, int]] = []
        """When the number of groups that are played changed, and to what."""
        self.untrained: list[int] = []
        self.is_training = False
        self.is_over = asyncio.Event()

    async def send(self, peer: str, message: ControlMessage) -> None:
        assert isinstance(message, RolloutRequest)
        version = self.policy.version
        seconds = self.rollout_s * self.draw.uniform(1 - self.spread, 1 + self.spread)

        def answer() -> None:
            self.rollouts.on_result(self.build_result(message, version))
            self._note()

        self.device.add("server", seconds, answer)
        self._note()

    def _note(self) -> None:
        self.num_playing.append((asyncio.get_running_loop().time(), len(self.rollouts._open)))

    async def announce(self, ready: BatchReady) -> None:
        self.untrained.append(ready.step)
        self._train()

    def _train(self) -> None:
        if self.untrained and not self.is_training:
            self.is_training = True
            self.device.add("trainer", self.train_s, self._trained)

    def _trained(self) -> None:
        self.is_training = False
        self.ends.append(asyncio.get_running_loop().time())
        self.policy.publish(PublishedWeights(self.untrained.pop(0), 0, "m", {}, 0))
        self._train()
        if len(self.ends) == STEPS:
            self.is_over.set()

    async def adopt(self, manifest: str) -> None:
        await asyncio.sleep(self.in_use_s)

    @property
    def step_s(self) -> list[float]:
        return [b - a for a, b in zip(self.ends[SETTLED:], self.ends[SETTLED + 1 :], strict=False)]


def play(
    run_dir: RunDir, is_one: bool, train_s: float, rollout_s: float, in_use_s: float, spread: float
) -> TimedWorld:
    async def main() -> TimedWorld:
        world = TimedWorld(run_dir, train_s, rollout_s, in_use_s, spread)
        world.device.is_one = is_one
        async with asyncio.TaskGroup() as group:
            adopting = group.create_task(world.policy.keep_adopting())
            training = group.create_task(world.build().train(range(1, STEPS + 2)))
            await world.is_over.wait()
            adopting.cancel()
            training.cancel()
        return world

    with asyncio.Runner(loop_factory=OwnClock) as runner:
        return runner.run(main())


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.make()
    return made


@pytest.mark.parametrize(
    ("is_one", "seconds", "spread"),
    take_first([*product([True, False], [(7.0, 7.5), (7.0, 4.0), (4.0, 7.0)], [0.0, 0.2])], 6),
)
def test_steps_are_even_where_a_version_is_in_use_at_once(
    run_dir: RunDir, is_one: bool, seconds: tuple[float, float], spread: float
) -> None:
    (train_s, rollout_s), in_use_s = seconds, 0.1
    world = play(run_dir, is_one, train_s, rollout_s, in_use_s, spread)
    most, least = max(world.step_s), min(world.step_s)
    assert most - least <= 2 * (in_use_s + spread * rollout_s)
    mean = sum(world.step_s) / len(world.step_s)
    bound = train_s + rollout_s if is_one else max(train_s, rollout_s)
    assert mean <= bound * (1 + spread) + in_use_s, "and none of them waits for another in vain"


@pytest.mark.parametrize("in_use_s", [0.1, 5.4])
def test_the_engine_has_one_steps_groups_at_a_time_and_all_of_them_while_it_is_the_slower(
    run_dir: RunDir, in_use_s: float
) -> None:
    world = play(run_dir, False, 2.0, 8.0, in_use_s, spread=0.0)
    settled = [(at, num) for at, num in world.num_playing if world.ends[2] < at < world.ends[-1]]
    assert max(num for _, num in settled) == GROUPS
    lasting = [num for (at, num), (end, _) in zip(settled, settled[1:], strict=False) if end > at]
    assert set(lasting) == {GROUPS}
