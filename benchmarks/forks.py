"""`python -m benchmarks forks`: forked rollouts and flat groups, on two tasks and several seeds."""

from __future__ import annotations

import argparse
import os
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.algorithms import EXAMPLES, PARTS, WINDOW, format_interval
from benchmarks.harness.warm_model import build_warm_model
from sightline import config
from sightline.bench.harness.workspace import add_options, run_sightline
from sightline.config import RunFile
from sightline.run.run_dir import RunDir
from sightline.view.events import by_step, read_events
from sightline.wire.file import append_line, read_lines

WALK = {"cells": 3, "side": 96, "max_turns": 6}
TASKS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "color_codeword": ("benchmarks.harness.forkable:ForkableCodeword", {}, 8, 128),
    "grid_walk": ("grid_walk:GridWalk", WALK, 4, 256),
}
"""Environment, its arguments, tokens of an answer and of a sequence."""
TRIES = 8
"""Tries of a group in every entry."""
ENTRIES: dict[str, tuple[int, str, str]] = {
    "flat": (0, "every", "rollout"),
    "forks at uncertain turns": (3, "uncertain", "siblings"),
    "forks at random turns": (3, "random", "siblings"),
    "forks at every turn": (3, "every", "siblings"),
    "forks, credit by rollout": (3, "uncertain", "rollout"),
}
"""Further tries of a rollout, where they begin, and the credit."""
MEASURES = ("trained tokens", "environment steps", "seconds")
RESULTS = "results.jsonl"


class Result(msgspec.Struct, frozen=True):
    """One run, stored as a line of the results."""

    task: str
    entry: str
    seed: int
    steps: int
    rewards: list[float]
    counts: dict[str, list[float]]
    """For each measure, its total after each step."""
    final: float
    """Reward on held-out tasks, which do not fork."""

    def reward_at(self, measure: str, limit: float) -> float:
        ended = [i for i, count in enumerate(self.counts[measure], 1) if count <= limit] or [1]
        return fmean(self.rewards[max(0, ended[-1] - WINDOW) : ended[-1]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the same fine-tuned tiny model with flat groups and with forked rollouts, with the "
        "same number of tries in a group, and prints the reward by trained tokens, environment "
        "steps and seconds. An interrupted comparison continues where it stopped."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and results")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--entries", nargs="+", default=[*ENTRIES], choices=ENTRIES)
    add_options(parser, seeds=3, steps=60, warmup_steps=200, jobs=1)


def run(args: argparse.Namespace) -> int:
    root = EXAMPLES.parent
    paths = [str(EXAMPLES / "grid_walk"), str(root), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    args.out.mkdir(parents=True, exist_ok=True)
    decoded = (msgspec.json.decode(one, type=Result) for one in read_lines(args.out / RESULTS))
    results = {(r.task, r.entry, r.seed): r for r in decoded if r.steps == args.steps}
    cells = [*product(args.tasks, args.entries, range(args.seeds))]
    missing = [cell for cell in cells if cell not in results]
    for task in dict.fromkeys(task for task, _, _ in missing):
        warm_up(args.out / task, task, args.warmup_steps)
    with ThreadPoolExecutor(args.jobs) as pool:
        played = pool.map(lambda cell: play(args.out, cell, args.steps), missing)
        for number, result in enumerate(played, 1):
            append_line(args.out / RESULTS, msgspec.json.encode(result))
            results[result.task, result.entry, result.seed] = result
            print(f"{number}/{len(missing)} {result.task}, {result.entry}, seed {result.seed}: "
                  f"held-out reward {result.final:.3f}", flush=True)  # fmt: skip
    for task in args.tasks:
        print("\n".join(show_task(task, [results[cell] for cell in cells if cell[0] == task])))
    return 0


def warm_up(folder: Path, task: str, steps: int) -> None:
    if (folder / "warm" / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    values = tomllib.loads((EXAMPLES / "color_codeword" / "warmup.toml").read_text())
    values["run"] = {"steps": steps}
    values["model"].pop("path")
    values["sft"].pop("output_dir")
    values["trainer"]["device"] = "cpu"
    if task == "grid_walk":
        # Some demonstrations take the shortest path, so that there is a success to reinforce.
        values["env"] = {"name": "grid_walk:GridWalk", "args": WALK | {"expert_fraction": 0.5}}
        values["model"]["train_vision"] = True
    build_warm_model(folder, values)


def play(folder: Path, cell: tuple[str, str, int], steps: int) -> Result:
    task, entry, seed = cell
    name = f"{task}-{entry.replace(' ', '_').replace(',', '')}-{seed}-{time.time_ns()}"
    env, env_args, max_tokens, max_model_len = TASKS[task]
    forks, at, credit = ENTRIES[entry]
    values: dict[str, Any] = tomllib.loads((EXAMPLES / "color_codeword" / "cpu.toml").read_text())
    values |= {
        "run": {"name": name, "dir": str(folder), "seed": seed, "steps": steps},
        "env": {"name": "forks", "args": {"env": env, "args": env_args, "forks": forks, "at": at}},
        "rollout": {"max_tokens": max_tokens},
        "eval": {"tasks": 256},
        "algorithm": {"advantage": "no_std", "credit": credit, "kl_coef": 0.1},
    }
    values["model"]["path"] = str((folder / task / "warm").resolve())
    values["orchestrator"]["group_size"] = TRIES // (1 + forks)
    values["inference"]["max_model_len"] = max_model_len
    values["trainer"]["device"] = values["inference"]["device"] = "cpu"
    file = config.validate_config(RunFile, values, name)
    run_sightline("rl", folder / f"{name}.toml", config.dump_toml(file), "--plain")
    run_dir = RunDir(folder / f"{name}-001")
    done = [event.values for event in by_step([*read_events(run_dir.metrics)], "step").values()]
    turns = [step["turns_mean"] * sum(step["verdicts"].values()) for step in done]
    counts = {
        "trained tokens": [float(step["tokens_trained_total"]) for step in done],
        "environment steps": [sum(turns[: i + 1]) for i in range(len(turns))],
        "seconds": [step["seconds_total"] for step in done],
    }
    summary = msgspec.json.decode((run_dir.path / "summary.json").read_bytes())
    rewards = [step["reward"] for step in done]
    return Result(*cell, steps, rewards, counts, summary["reward_final"])


def show_task(task: str, results: Sequence[Result]) -> Iterator[str]:
    """Yield a Markdown table for each measure, up to what every run has reached."""
    entries = dict.fromkeys(result.entry for result in results)
    for measure in MEASURES:
        limit = min(result.counts[measure][-1] for result in results)
        marks = [limit * (n + 1) / PARTS for n in range(PARTS)]
        heads = [f"{mark:,.0f} {measure}" for mark in marks]
        yield f"\n{task}\n\n| | held-out reward | {' | '.join(heads)} |"
        yield f"|---|{'---:|' * (PARTS + 1)}"
        for entry in entries:
            runs = [result for result in results if result.entry == entry]
            points = [[one.reward_at(measure, mark) for one in runs] for mark in marks]
            final = format_interval([one.final for one in runs])
            yield f"| {entry} | {final} | {' | '.join(map(format_interval, points))} |"
