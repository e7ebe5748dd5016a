"""Several environments in one run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sightline.config import RunFile, validate_config
from sightline.envs.protocol import build_environment
from sightline.errors import ConfigError
from sightline.orchestrator.task_order import TaskOrder, sequential


def run_file(**env: Any) -> RunFile:
    return validate_config(RunFile, {"model": {"path": "m"}, "env": env}, "run.toml")


MIXED: dict[str, Any] = {
    "mix": [
        {"name": "color_codeword", "weight": 3.0, "args": {"squares": 2}},
        {"name": "color_codeword", "label": "hard", "args": {"squares": 4}},
    ]
}


def test_mix_chooses_environments_by_weight_deterministically() -> None:
    env = build_environment(run_file(**MIXED).env)
    drawn = [env.choose_environment(i, "eval")[0] for i in range(4000)]
    share = Counter(member.name for member in drawn)
    assert 0.72 < share["color_codeword"] / 4000 < 0.78
    assert [env.choose_environment(i, "eval")[0] for i in range(4000)] == drawn
    for index in range(20):
        member, number = env.choose_environment(index, "eval")
        squares = 2 if member.name == "color_codeword" else 4
        assert number == index and len(member.task(index, "eval").data) == 3 * squares


def test_weights_of_a_mix_change_with_the_progress() -> None:
    changing = {"mix": [MIXED["mix"][0] | {"final_weight": 0.0}, MIXED["mix"][1]]}
    config = run_file(**changing).env
    env, progress = build_environment(config), 0.0
    order = TaskOrder(sequential, 0, {}, lambda: progress, config.mix)
    for at, share in ((0.0, 3 / 4), (0.5, 1.5 / 2.5), (1.0, 0.0)):
        progress = at
        tasks = [order.choose(group) for group in range(2000)]
        names = [env.choose_environment(task, "train")[0].name for task in tasks]
        assert abs(names.count("color_codeword") / 2000 - share) < 0.04


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_member_of_a_mix_plays_each_of_its_rows_once_per_epoch(
    shuffle: bool, tmp_path: Path
) -> None:
    mix = []
    for size, weight in ((100, 1.0), (60, 3.0)):
        file = tmp_path / f"{size}.jsonl"
        file.write_text('{"question": "?", "answer": "x"}\n' * size)
        args = {"path": str(file), "images": [], "eval_fraction": 0, "shuffle": shuffle}
        mix.append({"name": "dataset", "label": str(size), "weight": weight, "args": args})
    config = run_file(mix=mix).env
    env, rows = build_environment(config), {"100": list[int](), "60": list[int]()}
    order = TaskOrder(sequential, 0, {}, lambda: 0.0, config.mix)
    for task in map(order.choose, range(500)):
        member, index = env.choose_environment(task, "train")
        rows[member.name].append(member.task(index, "train").data)
    for size, numbers in ((100, rows["100"]), (60, rows["60"])):
        assert len(numbers) > size
        for start in range(0, len(numbers) - size, size):
            assert sorted(numbers[start : start + size]) == list(range(size))
        assert shuffle or numbers[:size] == list(range(size))


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({}, r"\[env\] name is missing"),
        ({"name": "color_codeword", **MIXED}, "next to"),
        ({"args": {"squares": 1}, **MIXED}, "next to"),
        ({"mix": [{"weight": 1.0}]}, "name is missing"),
        ({"mix": [{"name": "x", "weight": 0}]}, "greater than 0"),
    ],
)
def test_invalid_mix_is_refused(env: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_file(**env)


def test_two_environments_with_one_name_need_a_label() -> None:
    same = [{"name": "color_codeword"}, {"name": "color_codeword"}]
    with pytest.raises(ConfigError, match="two environments called 'color_codeword'"):
        build_environment(run_file(mix=same).env)
