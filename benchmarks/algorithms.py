"""`python -m benchmarks algorithms`: every algorithm by name, on two tasks, with several seeds."""

from __future__ import annotations

import argparse
import os
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.harness.warm_model import build_warm_model
from sightline import config
from sightline.bench.harness.workspace import add_options, run_sightline, work_folder
from sightline.config import RunFile
from sightline.errors import SightlineError
from sightline.run.confidence import student_t_interval
from sightline.run.run_dir import RunDir
from sightline.view.events import by_step, read_events
from sightline.wire.file import append_line, read_lines, write_atomic

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TASKS = {"color_codeword": 3, "counting": 1}
"""The turns of a rollout by task."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "ppo")},
    "ppo by turn": {"name": "ppo", "args": {"level": "turn"}},
    **{name: {} for name in ("gspo", "cispo", "sapo", "dpo")},
}
"""Settings by the name in the table. The rollout's reward is given at its end, for all of them."""
SHARED = {"kl_coef"}
"""Settings of a task's run file that algorithms share. They choose their own for the others."""
UNUSED = {"dpo": {"kl_coef"}}
"""The shared settings that an algorithm has no use for."""
RESULTS = "results.jsonl"
PARTS = 4
WINDOW = 3
"""Number of steps whose mean training reward a point of a curve shows."""


class Result(msgspec.Struct, frozen=True):
    """One run, stored as a line of the results."""

    task: str
    algorithm: str
    seed: int
    sizes: tuple[int, int, int]
    """Steps, steps of the warm-up, and held-out tasks."""
    rewards: list[float]
    rollouts: list[int]
    """Rollouts played until each step, with those that were replaced or did not train."""
    seconds: list[float]
    start: float
    final: float
    """Rewards on held-out tasks before the first step and after the last one."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.algorithm, self.seed

    def reward_at(self, counts: Sequence[float], limit: float) -> float:
        """Return the mean training reward of the last steps that `limit` of `counts` allows."""
        ended = [i for i, count in enumerate(counts, 1) if count <= limit] or [1]
        return fmean(self.rewards[max(0, ended[-1] - WINDOW) : ended[-1]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the same fine-tuned tiny model with every algorithm on two example tasks, and "
        "prints the reward by rollouts and by seconds, with 95% intervals over the seeds. With "
        "--out, an interrupted comparison continues where it stopped. All runs of a task start "
        "from one fine-tuned model, so the intervals do not contain its variance."
    )
    parser.add_argument("--out", type=Path, help="folder of the runs and results")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    add_options(parser, "dir", seeds=3, steps=60, warmup_steps=200, eval_tasks=256, jobs=1)


def run(args: argparse.Namespace) -> int:
    folders = [str(EXAMPLES / task) for task in args.tasks]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    cells = [*product(args.tasks, args.algorithms, range(args.seeds))]
    with nullcontext(args.out) if args.out else work_folder(args, needs_model=False) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        results = {one.key: one for one in _read_results(folder / RESULTS, _get_sizes(args))}
        missing = [cell for cell in cells if cell not in results]
        for task in dict.fromkeys(task for task, _, _ in missing):
            _warm_up(folder / task, task, args.warmup_steps)
        with ThreadPoolExecutor(args.jobs) as pool:
            played = pool.map(lambda cell: _play(folder, cell, args), missing)
            for number, result in enumerate(played, 1):
                if isinstance(result, SightlineError):
                    print(f"{number}/{len(missing)} failed: {result}", flush=True)
                    continue
                append_line(folder / RESULTS, msgspec.json.encode(result))
                results[result.key] = result
                print(
                    f"{number}/{len(missing)} {result.task}, {result.algorithm}, seed "
                    f"{result.seed}: held-out reward {result.start:.3f} to {result.final:.3f} in "
                    f"{result.seconds[-1]:.0f} s",
                    flush=True,
                )
    complete = [results[cell] for cell in cells if cell in results]
    tasks = [task for task in args.tasks if any(result.task == task for result in complete)]
    print("\n".join(line for task in tasks for line in show_task(task, complete)))
    return int(len(complete) < len(cells))


def _get_sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    return args.steps, args.warmup_steps, args.eval_tasks


def _read_results(path: Path, sizes: tuple[int, int, int]) -> list[Result]:
    """Return the results of runs of the same sizes, and remove a torn last line."""
    lines = read_lines(path)
    write_atomic(path, b"".join(line + b"\n" for line in lines))
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    return [result for result in results if result.sizes == sizes]


def _warm_up(folder: Path, task: str, steps: int) -> None:
    """Write the checkpoint that all runs of a task start from."""
    if (folder / "warm" / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    values = tomllib.loads((EXAMPLES / task / "warmup.toml").read_text())
    values["run"] = {"steps": steps}
    values["model"].pop("path")
    values["sft"].pop("output_dir")
    values["trainer"]["device"] = "cpu"
    build_warm_model(folder, values)


def _play(
    folder: Path, cell: tuple[str, str, int], args: argparse.Namespace
) -> Result | SightlineError:
    """Return the result of a run, or its error: the other runs go on."""
    try:
        return _run_cell(folder, cell, args)
    except SightlineError as error:
        return error


def _run_cell(folder: Path, cell: tuple[str, str, int], args: argparse.Namespace) -> Result:
    task, algorithm, seed = cell
    values: dict[str, Any] = tomllib.loads((EXAMPLES / task / "cpu.toml").read_text())
    label = algorithm.replace("+", "p").replace(" ", "_")
    name = f"{task}-{label}-{seed}-{time.time_ns()}"
    values["run"] = {"name": name, "dir": str(folder), "seed": seed, "steps": args.steps}
    values["model"]["path"] = str((folder / task / "warm").resolve())
    values["eval"] = {"tasks": args.eval_tasks}
    # A GPU is slower for such small models, and several runs would share it.
    values["trainer"]["device"] = values["inference"]["device"] = "cpu"
    kept = SHARED - UNUSED.get(algorithm, set())
    settings = {key: value for key, value in values["algorithm"].items() if key in kept}
    if algorithm == "dapo":
        longest = TASKS[task] * values["rollout"]["max_tokens"]
        settings["args"] = {"max_sampled_tokens": longest}
    values["algorithm"] = {"name": algorithm, **settings, **ALGORITHMS[algorithm]}
    file = config.validate_config(RunFile, values, name)
    run_sightline("rl", folder / f"{name}.toml", config.dump_toml(file), "--plain")
    events = [*read_events(RunDir(folder / f"{name}-001").metrics)]
    summary = msgspec.json.decode((folder / f"{name}-001" / "summary.json").read_bytes())
    steps = [event.values for event in by_step(events, "step").values()]
    return Result(
        *cell,
        _get_sizes(args),
        [step["reward"] for step in steps],
        [sum(step["verdicts"].values()) for step in steps],
        [step["seconds_total"] for step in steps],
        summary["reward_start"],
        summary["reward_final"],
    )


def show_task(task: str, results: Iterable[Result]) -> Iterator[str]:
    """Yield a Markdown table: held-out reward, and training reward by rollouts and by seconds."""
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.task == task:
            by_name[result.algorithm].append(result)
    rollouts = min(one.rollouts[-1] for runs in by_name.values() for one in runs)
    seconds = min(one.seconds[-1] for runs in by_name.values() for one in runs)
    marks = [(n + 1) / PARTS for n in range(PARTS)]
    heads = [f"{rollouts * mark:,.0f} rollouts" for mark in marks]
    heads += [f"{seconds * mark:.0f} s" for mark in marks]
    first = next(iter(by_name.values()))[0]
    yield f"\n{task}: {first.sizes[0]} steps, held-out reward {first.start:.3f} at the start\n"
    yield f"| algorithm | held-out reward | {' | '.join(heads)} | s/step |"
    yield f"|---|{'---:|' * (len(heads) + 2)}"
    for name, runs in sorted(by_name.items(), key=lambda one: -fmean(r.final for r in one[1])):
        cells = [[run.reward_at(run.rollouts, rollouts * m) for run in runs] for m in marks]
        cells += [[run.reward_at(run.seconds, seconds * m) for run in runs] for m in marks]
        curve = " | ".join(f"{fmean(cell):.2f}" for cell in cells)
        step_s = median(run.seconds[-1] / len(run.seconds) for run in runs)
        final = format_interval([run.final for run in runs])
        yield f"| `{name}` | {final} | {curve} | {step_s:.2f} |"


def format_interval(values: Sequence[float]) -> str:
    """Return the mean with its 95% interval, which a single value does not have."""
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    low, high = student_t_interval(values)
    return f"{fmean(values):.3f} ± {(high - low) / 2:.3f}"
