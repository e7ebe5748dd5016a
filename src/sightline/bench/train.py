"""`sightline bench train`: the trainer's step, taken apart, on recorded rollouts with images."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from sightline import config as config_module
from sightline.bench.harness.recorded import RecordingSpec, record_traces, train_recorded
from sightline.bench.harness.screenshots import SCREENSHOTS
from sightline.bench.harness.workspace import work_folder, write_tiny
from sightline.config import RunFile
from sightline.config.load import apply_overrides
from sightline.errors import ConfigError
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.view.events import by_step, read_events
from sightline.wire.event import Event

STAGES = ("wait", "materialize", "forward", "backward", "optimizer", "publish", "checkpoint")
MAX_STALL = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Records rollouts that show an image every turn, with answers drawn at random, "
        "and trains on them through the real orchestrator and trainer, without a sampler. Prints "
        "where the time of a step goes; steps of the warm-up are left out. The stall is the time "
        "that the loop waits for pixels, as a share of the step."
    )
    parser.add_argument("--model", type=Path, help="checkpoint; default: a new random one")
    parser.add_argument("--size", default="tiny", help="of the new one: tiny or 2b")
    parser.add_argument("--steps", type=int, default=6, help="default: %(default)s")
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps left out; default: %(default)s"
    )
    parser.add_argument("--rollouts", type=int, default=16, help="a step; default: %(default)s")
    parser.add_argument("--turns", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--side", type=int, default=512, help="of images; default: %(default)s")
    parser.add_argument("--answer", type=int, default=256, help="tokens; default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2, help="of the trainer on a CPU")
    parser.add_argument("--dir", type=Path, help="keep the run in this folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of the run"
    )


def run(args: argparse.Namespace) -> int:
    for name in ("steps", "rollouts", "turns", "side", "answer", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}", "take 1 or more")
    if args.rollouts % 2 or args.warmup >= args.steps:
        raise ConfigError(
            f"--rollouts {args.rollouts} --steps {args.steps} --warmup {args.warmup}",
            "take an even number of rollouts, and more steps than the warm-up has",
        )

    with work_folder(args.dir) as folder:
        model = args.model or write_tiny(folder / "model", args.size)
        config = run_file(args, model)
        run_dir = RunDir(folder / "run")
        run_dir.make()
        recording = RecordingSpec(args.turns, args.side, args.answer)
        traces = run_dir.path / "recorded.traces"
        print(f"recording {args.steps * args.rollouts} rollouts", flush=True)
        # Every step has images of its own, and some are played that no step trains.
        num = (args.steps + config.orchestrator.max_lag) * args.rollouts
        record_traces(model, MediaStore(run_dir.media), traces, num, recording)
        print("training", flush=True)
        train_recorded(config, run_dir, traces, args.threads)
        trained = by_step(read_events(run_dir.metrics), "train")
    print_table([event for step, event in trained.items() if step > args.warmup])
    return 0


def run_file(args: argparse.Namespace, model: Path) -> RunFile:
    size = next(n for n in (8, 4, 2) if args.rollouts % n == 0)
    values: dict[str, Any] = {
        "run": {"name": "bench", "steps": args.steps},
        "model": {"path": str(model.resolve()), "dtype": args.dtype},
        "env": {"name": SCREENSHOTS},
        "rollout": {"workers": 1},
        "orchestrator": {"group_size": size, "groups_per_step": args.rollouts // size},
        "trainer": {"lr": 1e-6, "checkpoint_every": 1_000_000, "stall_timeout_s": 900},
        "eval": {"tasks": 0},
    }
    apply_overrides(values, args.overrides)
    return config_module.validate_config(RunFile, values, "bench train")


def print_table(events: list[Event]) -> None:
    table = Table("stage", "seconds", "of the step", title="a step, median")
    found = figures(events)
    for stage in STAGES:
        if stage in found["seconds"]:
            seconds = found["seconds"][stage]
            table.add_row(stage, f"{seconds:.4f}", f"{seconds / found['step_s']:.1%}")
    table.add_row("the whole step", f"{found['step_s']:.4f}", "")
    console = Console()
    console.print(table)
    console.print(
        f"{found['tokens_per_s']:,.0f} tokens/s, {found['images']:.0f} images a step; "
        f"materializing is hidden to {found['hidden_share']:.1%}, and stalls the step for "
        f"{found['stall']:.2%} (target: under {MAX_STALL:.0%})",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if found["publish_s"] is not None:
        console.print(
            f"a version takes {found['publish_s']:.4f} s until its manifest is on the disk, "
            f"{found['publish_hidden_share']:.1%} of it beside the next step",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    print(json.dumps(found))


def figures(events: list[Event]) -> dict[str, Any]:
    """Medians over steps; materializing runs beside the rest, and only its stall is waited for."""
    stages = [event.values["seconds"] for event in events]
    step_s = [sum(s[name] for name in s if name != "materialize") for s in stages]
    stalls = [
        min(s["wait"], s["materialize"]) / total for s, total in zip(stages, step_s, strict=True)
    ]
    return {
        "steps": len(events),
        "seconds": {name: median(s[name] for s in stages) for name in stages[0]},
        "step_s": median(step_s),
        "tokens": median(event.values["tokens"] for event in events),
        "tokens_per_s": median(
            event.values["tokens"] / total for event, total in zip(events, step_s, strict=True)
        ),
        "images": median(event.values["images"] for event in events),
        "hidden_share": median(event.values["hidden_share"] for event in events),
        "stall": median(stalls),
        "publish_s": _median(events, "publish_s"),
        "publish_hidden_share": _median(events, "publish_hidden_share"),
    }


def _median(events: list[Event], name: str) -> float | None:
    """Over the steps that measured it."""
    found = [event.values[name] for event in events if event.values.get(name) is not None]
    return median(found) if found else None
