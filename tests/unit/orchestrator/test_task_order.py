"""Task orders: by number, by difficulty with its records, and by functions from outside."""

from __future__ import annotations

import random
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from sightline.config.sections import OrchestratorConfig
from sightline.errors import ConfigError
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.task_order import (
    TaskOrder,
    TaskRecord,
    difficulty,
    load_task_order,
    sequential,
)
from sightline.run import RunDir


def by_difficulty(num_tasks: int, **args: float) -> TaskOrder:
    settings = OrchestratorConfig.model_validate(
        {"task_order": "difficulty", "task_order_args": {"num_tasks": num_tasks, **args}}
    )
    return TaskOrder(load_task_order(settings), 0, {}, lambda: 0.5)


def test_sequential_order_plays_by_number_and_keeps_no_records() -> None:
    order = TaskOrder(sequential, 0, {}, lambda: 0.0)
    assert [order.choose(group) for group in (0, 7)] == [0, 7]
    assert not order.add(7, [1.0, 0.0], True) and not order.records


def test_record_follows_the_newest_groups() -> None:
    record = TaskRecord()
    record.add([0.0, 1.0], True)
    assert (record.reward, record.spread) == (0.5, 0.5)
    record.add([1.0, 1.0], False)
    assert (record.groups, record.with_signal, record.reward, record.spread) == (2, 1, 0.75, 0.25)
    record.add([1.0, 1.0], False)
    assert record.reward == 0.875, "the newest group counts for a half"


def test_every_task_is_tried_and_half_solved_ones_are_preferred() -> None:
    order = by_difficulty(30)
    rewards = {task: [0.0, 1.0] if task < 10 else [1.0, 1.0] for task in range(30)}
    played: Counter[int] = Counter()
    for group in range(600):
        task = order.choose(group)
        played[task] += 1
        order.add(task, rewards[task], task < 10)
    assert set(played) == set(range(30))
    assert sum(played[task] for task in range(10)) > 500
    # Three groups without signal set a task aside, and it is not drawn again.
    assert all(order.records[task].is_set_aside == (played[task] == 3) for task in range(10, 30))
    assert max(played[task] for task in range(10, 30)) <= 3


def test_task_is_reported_when_it_is_set_aside_and_only_then() -> None:
    order = by_difficulty(2)
    assert [order.add(1, [1.0, 1.0], False) for _ in range(4)] == [False, False, True, False]
    assert [order.add(0, [1.0, 1.0], True) for _ in range(4)] == [False] * 4
    order.records[0] = order.records[1]
    assert order.choose(5) in (0, 1), "if all are set aside, they are played again"


def test_choice_depends_on_the_seed_and_the_group_only() -> None:
    records = {task: TaskRecord(2, 1, 0.5, 0.1 * task) for task in range(8)}
    orders = [
        TaskOrder(lambda *x: difficulty(*x, num_tasks=8), seed, records, lambda: 0.0)
        for seed in (0, 0, 1)
    ]
    first, again, other = ([order.choose(g) for g in range(40)] for order in orders)
    assert first == again != other and len(set(first)) > 4


def test_records_and_open_tasks_survive_a_restart(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    run_state = RunState.open(run_dir)
    run_state.progress.tasks[400] = TaskRecord(3, 1, 0.25, 0.125)
    run_state.progress.open_tasks = {7: 400}
    run_state.save()
    progress = RunState.open(run_dir).progress
    assert progress.open_tasks == {7: 400}
    assert msgspec.to_builtins(progress.tasks) == {400: [3, 1, 0.25, 0.125]}


def test_external_order_sees_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("theirs")
    monkeypatch.setitem(sys.modules, "theirs", module)

    def easy_first(group: int, progress: float, records: object, rng: random.Random) -> int:
        return int(progress * 100) + group % 10

    module.easy_first = easy_first  # type: ignore[attr-defined]
    module.wrong = lambda group, progress, records, rng: "7"  # type: ignore[attr-defined]
    order = TaskOrder(
        load_task_order(OrchestratorConfig(task_order="theirs:easy_first")), 0, {}, lambda: 0.25
    )
    assert order.choose(13) == 28
    for settings, problem in (
        ({"task_order": "theirs:wrong"}, "returned '7'"),
        ({"task_order": "random"}, "is not built in"),
        ({"task_order": "difficulty"}, "num_tasks"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_task_order(OrchestratorConfig.model_validate(settings))


def test_documented_curriculum_grows_with_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "task_order.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = ModuleType("my_tasks")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_tasks", module)
    built_in, own, _ = (
        tomllib.loads(text)["orchestrator"] for text in re.findall(r"```toml\n(.*?)```", page, re.S)
    )
    load_task_order(OrchestratorConfig.model_validate(built_in))
    function = load_task_order(OrchestratorConfig.model_validate(own))
    for progress, largest in ((0.0, 200), (1.0, 2000)):
        tasks = [function(g, progress, {}, random.Random(g)) for g in range(2000)]
        assert 0.9 * largest < max(tasks) < largest
