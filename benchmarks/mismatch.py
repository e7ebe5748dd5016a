"""`python -m benchmarks mismatch`: the effect of mismatch on learning, for each correction."""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import msgspec
import torch

from benchmarks.harness.chart import Series, line_chart, smooth
from benchmarks.harness.mismatch_run import (
    GRAINY,
    MAX_PIXELS,
    Mismatch,
    RunRecord,
    StudyRun,
    StudySize,
)
from benchmarks.harness.warm_model import build_warm_model
from sightline.bench.harness.workspace import add_options, work_folder
from sightline.compute.model import pick_device
from sightline.errors import ConfigError
from sightline.wire.file import append_line

CORRECTIONS = ("none", "ppo", "tis", "cispo")
EXACT = "exact"
CONDITIONS = (
    EXACT,
    "lag=1", "lag=4", "lag=8",
    "noise=0.3", "noise=1",
    "stale=20",
    "filter=nearest",
    "dtype=bfloat16",
)  # fmt: skip
KINDS = {
    "lag": "lag, versions",
    "noise": "standard deviation of the noise, 0.01 nats",
}
"""Kinds of mismatch that have charts, with the labels of their x axes."""
GOAL = 0.9
WINDOW = 3
"""Number of steps whose mean reward must reach the goal."""
LAST = 5
"""Number of last steps whose mean reward is shown."""
RESULTS = "results.jsonl"
WARMUP_STEPS = 200


class Result(msgspec.Struct, frozen=True):
    """One run of the study, stored as a line of its file."""

    condition: str
    correction: str
    seed: int
    size: StudySize
    record: RunRecord

    @property
    def cell(self) -> Cell:
        return Cell(self.condition, self.correction, self.seed)

    @property
    def last(self) -> float:
        return fmean(self.record.rewards[-LAST:])

    @property
    def steps_to_goal(self) -> float:
        """The first step at which the mean over `WINDOW` steps reached the goal, or inf."""
        rewards = self.record.rewards
        means = (fmean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1))
        reached = (i for i, mean in enumerate(means, WINDOW) if mean >= GOAL)
        return next(reached, math.inf)

    @property
    def cosine(self) -> float:
        return fmean(self.record.cosines) if self.record.cosines else math.nan

    @property
    def norm_ratio(self) -> float:
        """The median ratio, because a token with a tiny ratio makes the true norm small."""
        return median(self.record.norm_ratios) if self.record.norm_ratios else math.nan


@dataclass(frozen=True)
class Cell:
    condition: str
    correction: str
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a tiny model in one process, once for each mismatch between sampler and trainer, "
        "each correction and each seed, and prints reward and gradient as tables. With --out a "
        "study that was interrupted goes on where it stopped."
    )
    parser.add_argument("--out", type=Path, help="folder of the results, one JSON line a run")
    parser.add_argument(
        "--conditions", nargs="+", default=CONDITIONS, metavar="KIND=LEVEL",
        help=f"default: {' '.join(CONDITIONS)}",
    )  # fmt: skip
    parser.add_argument(
        "--corrections", nargs="+", default=CORRECTIONS,
        help="losses of a run file, or none; default: %(default)s",
    )  # fmt: skip
    sizes = ("steps", "groups", "group_size", "turns", "eval_tasks", "gradient_every")
    numbers = {name: getattr(StudySize, name) for name in sizes}
    add_options(parser, "model", "plot", "device", "dtype", seeds=3, **numbers)


def run(args: argparse.Namespace) -> int:
    names = [one.name for one in dataclasses.fields(StudySize)]
    args.device = pick_device(args.device)
    size = StudySize(**{name: getattr(args, name) for name in names})
    conditions = {name: parse_condition(name) for name in args.conditions}
    with nullcontext(args.out) if args.out else work_folder(args, needs_model=False) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        results = read_results(folder / RESULTS, size)
        cells = list_cells(args.conditions, args.corrections, args.seeds)
        missing = [cell for cell in cells if cell not in {one.cell for one in results}]
        if missing:
            model = args.model or _make_model(folder, args.turns)
            torch.set_num_threads(1)  # the model is too tiny for several threads
        for number, cell in enumerate(missing, 1):
            record = run_cell(model, size, conditions[cell.condition], cell)
            result = Result(cell.condition, cell.correction, cell.seed, size, record)
            append_line(folder / RESULTS, msgspec.json.encode(result))
            results.append(result)
            print(
                f"{number}/{len(missing)} {cell.condition}, {cell.correction}, seed {cell.seed}: "
                f"reward {result.last:.3f} at last, {record.final:.3f} held out; gradient's cosine "
                f"{result.cosine:.3f}, norm {result.norm_ratio:.2f}; KL {record.kl:.2g}; "
                f"{record.seconds:.1f} s",
                flush=True,
            )
        results = sorted(
            (one for one in results if one.cell in cells), key=lambda one: cells.index(one.cell)
        )
    for table in format_tables(results):
        print(f"\n{table}")
    if args.plot is not None:
        args.plot.mkdir(parents=True, exist_ok=True)
        for name, picture in draw_charts(results):
            (args.plot / f"{name}.svg").write_text(picture)
        print(f"\ncharts: {args.plot}")
    return 0


def parse_condition(name: str) -> Mismatch:
    """Parse the name of a mismatch, such as lag=4."""
    kind, _, level = name.partition("=")
    try:
        match kind:
            case "exact" if not level:
                return Mismatch(is_exact=True)
            case "lag":
                return Mismatch(lag=int(level))
            case "noise":
                return Mismatch(noise=float(level))
            case "stale":
                return Mismatch(stale_features=int(level))
            case "filter":
                return Mismatch(filter=level)
            case "dtype":
                return Mismatch(dtype=level)
    except ValueError:
        pass
    raise ConfigError(
        f"--conditions {name!r} is no mismatch", f"take some of {' '.join(CONDITIONS)}"
    )


def list_cells(conditions: Sequence[str], corrections: Sequence[str], seeds: int) -> list[Cell]:
    """List the runs seed by seed, so that an interrupted study has whole grids. `exact` has one
    run per seed: with a ratio of 1, all corrections give the same loss."""
    return [
        Cell(condition, correction, seed)
        for seed in range(seeds)
        for condition in conditions
        for correction in (("none",) if condition == EXACT else corrections)
    ]


def read_results(path: Path, size: StudySize) -> list[Result]:
    """Return the results of a study so far."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    if any(result.size != size for result in results):
        raise ConfigError(
            f"{path} holds runs of a different size: {results[0].size}",
            "choose another --out, or pass the options that it was begun with",
        )
    return results


def _make_model(folder: Path, turns: int) -> Path:
    """Build a tiny checkpoint that answers in the right format but knows no colours."""
    warm = folder / "warm"
    if not warm.is_dir():
        values: dict[str, dict[str, Any]] = {
            "run": {"steps": WARMUP_STEPS},
            "model": {"train_vision": False, "max_pixels": MAX_PIXELS},
            "env": {"name": GRAINY, "args": {"turns": turns}},
            "sft": {"batch_size": 16},
            "trainer": {"lr": 6e-3, "warmup_steps": 10, "lr_schedule": "linear",
                        "final_lr_fraction": 0.05},
        }  # fmt: skip
        build_warm_model(folder, values)
    return warm


def run_cell(model: Path, size: StudySize, mismatch: Mismatch, cell: Cell) -> RunRecord:
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        study = StudyRun(model, Path(folder), size, mismatch, cell.correction, cell.seed)
        try:
            return study.run()
        finally:
            study.close()


# --- results


def format_range(values: Sequence[float], digits: int) -> str:
    """Format the mean, minimum and maximum over seeds. Infinite values count as never."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "never" if any(map(math.isinf, values)) else "–"
    text = f"{fmean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ({min(known):.{digits}f}–{max(known):.{digits}f})"
    missed = len(values) - len(known)
    return f"{text}, {missed} never" if missed else text


MEASURES: dict[str, tuple[Callable[[Result], float], int]] = {
    f"reward over the last {LAST} steps": (lambda one: one.last, 3),
    "reward over all steps": (lambda one: fmean(one.record.rewards), 3),
    "reward of the trained weights, held out": (lambda one: one.record.final, 3),
    f"steps to {GOAL}": (lambda one: one.steps_to_goal, 1),
    "cosine to the on-policy gradient": (lambda one: one.cosine, 3),
    "norm over that of the on-policy gradient": (lambda one: one.norm_ratio, 2),
    "fraction of tokens clipped": (lambda one: one.record.clip_fraction, 3),
}


def format_tables(results: Sequence[Result]) -> Iterator[str]:
    """Yield a Markdown table for each measure: conditions as rows, corrections as columns."""
    conditions = list(dict.fromkeys(result.condition for result in results))
    corrections = list(dict.fromkeys(result.correction for result in results))
    for title, (measure, digits) in MEASURES.items():
        lines = [f"| {title} | {' | '.join(corrections)} |", "|---" * (len(corrections) + 1) + "|"]
        for condition in conditions:
            cells = [
                format_range([measure(result) for result in _select(results, condition, c)], digits)
                for c in corrections
            ]
            lines.append(f"| `{condition}` | {' | '.join(cells)} |")
        yield "\n".join(lines)
    yield format_differences(results, corrections)
    lines = ["| | KL of sampler and trainer | runs | seconds a run |", "|---|---|---|---|"]
    for condition in conditions:
        of = [result.record for result in results if result.condition == condition]
        figures = f"{fmean(r.kl for r in of):.2g} | {len(of)} | {fmean(r.seconds for r in of):.1f}"
        lines.append(f"| `{condition}` | {figures} |")
    yield "\n".join(lines)


def format_differences(results: Sequence[Result], corrections: Sequence[str]) -> str:
    """Format the reward over all steps, minus that of `exact` with the same seed, by kind of
    mismatch: the mean and its standard error."""
    exact = {o.seed: fmean(o.record.rewards) for o in results if o.condition == EXACT}
    kinds: dict[str, dict[str, list[float]]] = {}
    for result in results:
        if result.condition != EXACT and result.seed in exact:
            cells = kinds.setdefault(result.condition.split("=")[0], {})
            difference = fmean(result.record.rewards) - exact[result.seed]
            cells.setdefault(result.correction, []).append(difference)
    title = "reward over all steps, less that of `exact` by seed"
    lines = [f"| {title} | {' | '.join(corrections)} |", "|---" * (len(corrections) + 1) + "|"]
    for kind, cells in kinds.items():
        row = []
        for differences in (cells.get(correction, []) for correction in corrections):
            error = (
                f" ± {stdev(differences) / math.sqrt(len(differences)):.2f}"
                if len(differences) > 1
                else ""
            )
            row.append(
                f"{fmean(differences):+.2f}{error} ({len(differences)})" if differences else "–"
            )
        lines.append(f"| {kind} | {' | '.join(row)} |")
    return "\n".join(lines)


def _select(results: Iterable[Result], condition: str, correction: str) -> list[Result]:
    return [o for o in results if o.condition == condition and o.correction == correction]


def draw_charts(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Draw reward and cosine by level for each kind, and reward by step at its highest level."""
    corrections = [c for c in CORRECTIONS if any(one.correction == c for one in results)]
    exact = [one for one in results if one.condition == EXACT]
    for kind, x_label in KINDS.items():
        names = {o.condition for o in results if o.condition.startswith(f"{kind}=")}
        levels = sorted(names, key=_find_level)
        if not levels:
            continue
        for measure, title, get in (
            ("reward", f"Reward over the last {LAST} steps", lambda one: one.last),
            ("gradient", "Cosine to the on-policy gradient", lambda one: one.cosine),
        ):
            series = []
            for i, correction in enumerate(corrections):
                points, bars = [], []
                for name in levels if not exact else [EXACT, *levels]:
                    selected = exact if name == EXACT else _select(results, name, correction)
                    values = [v for v in map(get, selected) if math.isfinite(v)]
                    if values:
                        # Shift the points, so that no bar hides another.
                        shift = (i - 1.5) * 0.006 * _find_level(levels[-1])
                        points.append((_find_level(name) + shift, fmean(values)))
                        bars.append((min(values), max(values)))
                series.append(Series(correction, points, colour=i, bars=bars))
            yield f"mismatch_{kind}_{measure}", line_chart(title, series, x_label)
        series = []
        for i, correction in enumerate(corrections):
            selected = _select(results, levels[-1], correction)
            if selected:
                steps = zip(*(one.record.rewards for one in selected), strict=True)
                means = [(step, fmean(values)) for step, values in enumerate(steps, 1)]
                series.append(Series(correction, smooth(means, WINDOW), colour=i))
        title = f"Reward by step at {levels[-1]}, mean of {WINDOW} steps and of the seeds"
        yield f"mismatch_{kind}_curves", line_chart(title, series, y_range=(0.0, 1.0))


def _find_level(condition: str) -> float:
    """Return a condition's position on its axis, which has whole numbers."""
    kind, _, level = condition.partition("=")
    return 0.0 if not level else float(level) * (100 if kind == "noise" else 1)
