"""`python -m benchmarks rollout`: memory and network traffic of long rollouts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.harness.rehearsal import RehearsalFigures, RehearsalPlan, rehearse
from sightline.bench.harness.workspace import add_options, work_folder
from sightline.errors import ConfigError

TABLE_WIDTH = 130
MB = 1e6

Measure = Callable[["RehearsalFigures"], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plays rollouts that show a screenshot every turn, with one, a tenth, a "
        "quarter, half and all of the turns, through the real orchestrator, worker, store and "
        "renderer. A program without a model answers for the policy."
    )
    add_options(parser, "model", "dir", rollouts=64, turns=100, width=1280, height=720)
    parser.add_argument(
        "--agents", type=int, default=4,
        help="rollouts of the second part, played by agents that send their history with every "
        "request; 0 leaves it out; default: %(default)s",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.rollouts % 2 or args.agents % 2:
        problem = f"--rollouts {args.rollouts} --agents {args.agents} are not both even"
        raise ConfigError(problem, "take even numbers: rollouts come in groups")
    with work_folder(args) as folder:
        measured = measure(args, folder)
        by_agents = measure_agents(args, folder) if args.agents else []
    console = Console()
    # Do not cut or fold rows. A narrow terminal wraps them itself.
    console.width = max(console.width, TABLE_WIDTH)
    for table in (wire_table(measured), cpu_table(measured), memory_table(measured)):
        console.print(table)
    for line in closing_lines(measured):
        console.print(line, highlight=False, soft_wrap=True)
    if by_agents:
        console.print(agent_table(by_agents))
    return 1 if any(_encoded_images(figures) for figures in (*measured, *by_agents)) else 0


def measure(args: argparse.Namespace, folder: Path) -> list[RehearsalFigures]:
    return [_play(args, args.rollouts, turns, folder) for turns in turn_counts(args.turns)]


def measure_agents(args: argparse.Namespace, folder: Path) -> list[RehearsalFigures]:
    """Measure agents that use the chat endpoint, and send all images every turn."""
    return [_play(args, args.agents, turns, folder, True) for turns in turn_counts(args.turns)]


def _play(
    args: argparse.Namespace, rollouts: int, turns: int, folder: Path, uses_agents: bool = False
) -> RehearsalFigures:
    plan = RehearsalPlan(rollouts, turns, args.width, args.height, uses_agents=uses_agents)
    by = " by agents at the chat endpoint" * uses_agents
    print(f"{rollouts} rollouts of {turns} turns at {args.width}x{args.height}{by}", flush=True)
    place = folder / f"{'agents' if uses_agents else 'turns'}_{turns}"
    figures = rehearse(plan, args.model, place)
    print(f"  {plan.num_turns:,} turns in {figures.seconds:.0f} s", flush=True)
    return figures


def turn_counts(turns: int) -> list[int]:
    return sorted({1, *(max(1, turns // part) for part in (10, 4, 2, 1))})


# --- tables


def memory_table(measured: list[RehearsalFigures]) -> Table:
    table = _table("Peak memory (VmHWM), all rollouts in flight at once", measured)
    table.add_row("longest prompt, tokens", *(f"{f.policy.longest_prompt:,}" for f in measured))
    for name in measured[0].memory:
        peaks = [f.memory[name] for f in measured]
        grown = [memory.peak - memory.start for memory in peaks]
        per_turn = [g / f.plan.num_turns for g, f in zip(grown, measured, strict=True)]
        table.add_row(f"{name}: at start, MB", *(f"{m.start / MB:.1f}" for m in peaks))
        table.add_row(f"{name}: peak, MB", *(f"{m.peak / MB:.1f}" for m in peaks))
        table.add_row(f"{name}: grown, KB a turn", *(f"{g / 1e3:.1f}" for g in per_turn))
    held_mb = (_size(f.resent.held_floats / MB) for f in measured)
    table.add_row("all images held as float32, MB *", *held_mb)
    return table


FLAT: tuple[tuple[str, Measure], ...] = (
    ("worker -> store, new images", lambda f: f.stored),
    (
        "worker -> policy, all else",
        lambda f: f.policy.received_bytes - f.policy.id_bytes - f.policy.reference_bytes,
    ),
    ("policy -> worker, all else", lambda f: f.policy.sent_bytes - f.policy.digest_bytes),
    ("orchestrator -> worker", lambda f: f.to_worker),
    ("worker -> orchestrator, traces", lambda f: f.to_orchestrator),
    ("orchestrator -> disk, traces", lambda f: f.traces),
    ("orchestrator -> disk, batch", lambda f: f.batch),
)
GROWING: tuple[tuple[str, Measure], ...] = (
    ("worker -> policy, prompt ids", lambda f: f.policy.id_bytes),
    ("worker -> policy, references", lambda f: f.policy.reference_bytes),
    ("policy -> worker, pixel digests", lambda f: f.policy.digest_bytes),
)
"""Parts of the history that a self-contained request and its answer repeat."""
RESENT: tuple[tuple[str, Measure], ...] = (
    ("all images every turn, data URLs *", lambda f: f.resent.data_urls),
    ("all images every turn, float32 *", lambda f: f.resent.floats),
)


def wire_table(measured: list[RehearsalFigures]) -> Table:
    table = _table("Bytes on each wire, KB a turn", measured)
    for heading in ("growth", "MB in all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rows in (FLAT, GROWING, RESENT):
        for label, of in rows:
            table.add_row(label, *_cells(measured, of, 1e3), _size(of(measured[-1]) / MB))
        table.add_section()
    return table


CPU: tuple[tuple[str, Measure], ...] = (
    ("orchestrator", lambda f: f.cpu_s["orchestrator"]),
    ("worker", lambda f: f.cpu_s["worker-0"]),
)
"""CPU time by process. The worker's grows with the ids and references in a request."""


def cpu_table(measured: list[RehearsalFigures]) -> Table:
    table = _table("CPU time, ms a turn", measured)
    table.add_column("growth", justify="right", no_wrap=True)
    for label, of in CPU:
        table.add_row(label, *_cells(measured, of, 1e-3))
    return table


AGENT_ROWS: tuple[tuple[str, Measure, float], ...] = (
    ("agent -> endpoint, new images, KB", lambda f: f.first_sent, 1e3),
    ("worker -> store, new images, KB", lambda f: f.stored, 1e3),
    ("CPU of the worker, ms", lambda f: f.cpu_s["worker-0"], 1e-3),
)


def agent_table(measured: list[RehearsalFigures]) -> Table:
    title = f"{measured[0].plan.rollouts} agents at the chat endpoint, a turn"
    table = _table(title, measured)
    table.add_column("growth", justify="right", no_wrap=True)
    for label, of, unit in AGENT_ROWS:
        table.add_row(label, *_cells(measured, of, unit))
    return table


def _table(title: str, measured: list[RehearsalFigures]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for figures in measured:
        table.add_column(f"{figures.plan.turns} turns", justify="right", no_wrap=True)
    return table


def _cells(measured: list[RehearsalFigures], of: Measure, unit: float) -> list[str]:
    """Return the cost of a turn at each length, and the growth to the longest."""
    per_turn = [of(figures) / figures.plan.num_turns for figures in measured]
    # Not the rollout of one turn, whose only turn bears all fixed costs.
    base = per_turn[min(1, len(per_turn) - 1)]
    return [*(_size(cost / unit) for cost in per_turn), f"x {per_turn[-1] / (base or 1):.1f}"]


def _size(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def closing_lines(measured: list[RehearsalFigures]) -> list[str]:
    base, longest = measured[min(1, len(measured) - 1)], measured[-1]
    policy, resent = longest.policy, longest.resent
    references = max(policy.reference_bytes, 1)
    return [
        f"growth: the cost of a turn at {longest.plan.turns} turns to those at "
        f"{base.plan.turns}; x 1.0 is flat",
        "* counted, neither held nor sent: every turn posts all screenshots so far, as PNG or as "
        "float32 rows, in base64",
        f"{longest.stored_images:,} images of {longest.stored / longest.stored_images / 1e3:.0f} "
        f"KB, each stored once and named {policy.slots:,} times to the policy, "
        f"{references / policy.slots:.0f} bytes each",
        f"images sent again would be {resent.data_urls / references:,.0f} (data URLs) and "
        f"{resent.floats / references:,.0f} (float32) times the bytes of the references",
        f"encoded images in messages, batches and traces: "
        f"{sum(_encoded_images(figures) for figures in measured)}",
    ]


def _encoded_images(figures: RehearsalFigures) -> int:
    return figures.encoded_images + figures.policy.encoded_images
