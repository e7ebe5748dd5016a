"""A simulated run against what can be said of it by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sightline.bench.harness.loop_constants import read_loops
from sightline.bench.harness.simulation import Machines, Simulation, Speeds, Workload
from sightline.errors import ConfigError

WORK = Workload(
    groups_per_step=4, group_size=2, max_lag=0, turns=2, prompt_tokens=100, answer_tokens=10,
    image_bytes=1000, environment_s=0.01,
)  # fmt: skip
SPEEDS = Speeds(
    decode_step_s=0.01, decode_row_s=0.0, prefill_tokens_per_s=1e12, train_tokens_per_s=1e4,
    step_s=0.5, publish_s=0.2, adopt_s=0.1, model_bytes=0,
)  # fmt: skip
ONE = Machines(servers=1, trainer_gpus=1, workers=1000)


def test_without_lag_a_step_is_the_sum_of_what_follows_one_another() -> None:
    found = Simulation(WORK, SPEEDS, ONE).run(4)
    rollout = 2 * (0.01 + 10 * 0.01) + 0.01  # the environment ends a rollout, too
    training = 0.5 + 8 * 2 * 110 / 1e4
    # The first observations are made while the server takes the weights.
    updating = 0.2 + 0.1 - 0.01
    assert found.step_s == pytest.approx([rollout + training + updating] * 3, rel=1e-6)
    assert found.tokens_sampled == 3 * 8 * 2 * 10 and found.lag == 0


def test_with_lag_the_slower_of_two_sets_the_pace() -> None:
    slow = replace(SPEEDS, decode_step_s=0.2)
    found = Simulation(replace(WORK, max_lag=1), slow, ONE).run(6)
    assert found.bottleneck == "servers" and found.busy["servers"] > 0.85
    fast = Simulation(replace(WORK, max_lag=1), replace(SPEEDS, train_tokens_per_s=500), ONE).run(6)
    assert fast.bottleneck == "trainer" and fast.busy["trainer"] > 0.9
    assert fast.step_s[-1] == pytest.approx(0.5 + 8 * 2 * 110 / 500, rel=0.05)


def test_processes_of_one_machine_share_its_cores() -> None:
    alone = Simulation(WORK, SPEEDS, ONE).run(4)
    # What is computed at once is eight environments at most, and then one server or the trainer.
    shared = Simulation(WORK, SPEEDS, replace(ONE, cores=8)).run(4)
    assert shared.seconds == pytest.approx(alone.seconds, rel=1e-6)
    crowded = Simulation(WORK, SPEEDS, replace(ONE, cores=0.5)).run(4)
    assert crowded.seconds > 1.5 * alone.seconds


def test_lost_servers_cost_time_and_no_rollout() -> None:
    many = replace(ONE, servers=4)
    speeds = replace(SPEEDS, start_s=5.0)
    well = Simulation(WORK, speeds, many).run(30)
    ill = Simulation(WORK, speeds, replace(many, failures_per_gpu_hour=200.0)).run(30)
    assert ill.failures > 3 and ill.seconds > well.seconds
    assert ill.tokens_sampled == well.tokens_sampled


def test_weights_on_their_way_to_many_servers_fill_a_wire() -> None:
    large = replace(SPEEDS, model_bytes=10**11)
    found = Simulation(WORK, large, replace(ONE, servers=8, store_bytes_per_s=5e9)).run(4)
    assert found.bottleneck == "wire: store"
    assert found.bytes_by_wire["weights"] * found.seconds == pytest.approx(3 * 8 * 10**11, rel=0.4)


def test_files_that_say_nothing_of_speeds_are_refused(tmp_path: Path) -> None:
    idle = {"engine": {"decode_steps": 0}, "model_bytes": 1, "seconds": {"trainer": {}}}
    (tmp_path / "idle.json").write_text(json.dumps(idle))
    (tmp_path / "other.json").write_text("[]")
    for name, problem in (
        ("idle.json", "nothing was decoded"),
        ("other.json", "is not what `sightline bench loop -o` writes"),
        ("missing.json", "No such file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_loops([tmp_path / name])
