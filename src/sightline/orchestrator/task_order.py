"""The order of tasks: by number, by difficulty, or by a function of your own.

Each task keeps a record of its groups' rewards, which is saved with the run's progress.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import msgspec

from sightline.algo.registry import load_function, try_function
from sightline.config.sections import EnvMixEntry, OrchestratorConfig
from sightline.errors import ConfigError
from sightline.rollout.evaluation import derive_seed

SETTING = "[orchestrator] task_order"
NEWEST_WEIGHT = 0.5
"""Weight of the newest group in a task's averages."""
SET_ASIDE_AFTER = 3
"""A task is set aside after this many groups, if none of them had a signal."""
MIN_SPREAD = 0.02
"""Lower bound of a played task's weight, so that solved tasks are played again now and then."""


class TaskRecord(msgspec.Struct, array_like=True):
    """The rewards that a task's groups had so far."""

    groups: int = 0
    with_signal: int = 0
    """Number of groups that trained on more than a KL term."""
    reward: float = 0.0
    """Moving average of the groups' mean rewards: the success rate, if rewards are 0 or 1."""
    spread: float = 0.0
    """Moving average of the standard deviation in a group."""

    @property
    def is_set_aside(self) -> bool:
        return self.groups >= SET_ASIDE_AFTER and not self.with_signal

    def add(self, rewards: Sequence[float], has_signal: bool) -> None:
        spread = pstdev(rewards)
        weight = NEWEST_WEIGHT if self.groups else 1.0
        self.groups += 1
        self.with_signal += has_signal
        self.reward += weight * (fmean(rewards) - self.reward)
        self.spread += weight * (spread - self.spread)


TaskFunction = Callable[[int, float, Mapping[int, TaskRecord], random.Random], int]


def sequential(
    group: int, progress: float, records: Mapping[int, TaskRecord], rng: random.Random
) -> int:
    """Play the tasks by their numbers."""
    return group


def difficulty(
    group: int,
    progress: float,
    records: Mapping[int, TaskRecord],
    rng: random.Random,
    *,
    num_tasks: int,
    new_fraction: float = 0.5,
) -> int:
    """Prefer tasks whose rewards differ most: neither solved nor out of reach.

    While there are new tasks, they get `new_fraction` of the groups. The others are drawn with
    weights that grow with the spread of their rewards. Tasks that are set aside are not drawn.
    """
    tasks = [task for task, record in records.items() if not record.is_set_aside]
    if len(records) < num_tasks and (not tasks or rng.random() < new_fraction):
        # A full period: `first + k step` meets every task once.
        start = rng.randrange(num_tasks)
        return next(t for k in range(num_tasks) if (t := (start + k) % num_tasks) not in records)
    tasks = tasks or list(records)  # all were set aside: they get another chance
    weights = [max(records[task].spread, MIN_SPREAD) for task in tasks]
    return rng.choices(tasks, weights)[0]


TASK_ORDERS: dict[str, Callable[..., int]] = {"sequential": sequential, "difficulty": difficulty}


def load_task_order(settings: OrchestratorConfig) -> TaskFunction:
    """Load a run's task order. One from outside the package is tested first."""
    name, args = settings.task_order, settings.task_order_args
    function = load_function(
        SETTING, name, TASK_ORDERS, args, ("group", "progress", "records", "rng")
    )
    for records in ({}, {0: TaskRecord(4, 2, 0.5, 0.5)}):
        task = try_function(SETTING, name, function, 7, 0.5, records, random.Random(0))
        if not isinstance(task, int) or task < 0:
            raise ConfigError(f"{SETTING} = {name!r} returned {task!r}", "return a task's number")
    return function


@dataclass
class TaskOrder:
    """Chooses the task of each group, and records their rewards."""

    function: TaskFunction
    seed: int
    records: dict[int, TaskRecord]
    get_progress: Callable[[], float]
    mix: Sequence[EnvMixEntry] = ()
    mix_groups: dict[int, int] = field(default_factory=dict)
    """Number of groups that each member of the mix has had, in the sequential order."""

    def choose(self, group: int) -> int:
        rng = random.Random(derive_seed(self.seed, f"task of g{group}"))
        progress = self.get_progress()
        task = self.function(group, progress, self.records, rng)
        if self.mix and self.function is sequential:
            # The members of a mix alternate by task. Each plays its own tasks by number.
            weights = [entry.weight_at(progress) for entry in self.mix]
            [member] = rng.choices(range(len(weights)), weights)
            number = self.mix_groups.get(member, 0)
            self.mix_groups[member] = number + 1
            return number * len(weights) + member
        return task

    def add(self, task: int, rewards: Sequence[float], has_signal: bool) -> bool:
        """Record a group's rewards. Return whether its task is now set aside.

        The sequential order needs no records: it may play any number of tasks.
        """
        if self.function is sequential or not rewards:
            return False
        record = self.records.setdefault(task, TaskRecord())
        was_set_aside = record.is_set_aside
        record.add(rewards, has_signal)
        return record.is_set_aside and not was_set_aside
