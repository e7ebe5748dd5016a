"""`sightline bench loop`: time a whole run on one device, and account for every second."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from sightline import config as config_module
from sightline.bench.harness.loop_account import OTHER, LoopAccount, account_loop
from sightline.bench.harness.loop_bound import LoopBound, bound_loop
from sightline.bench.harness.screenshots import SCREENSHOTS, Screenshots
from sightline.bench.harness.workspace import (
    add_options,
    open_renderer,
    print_table,
    run_sightline,
    work_folder,
)
from sightline.compute.model import pick_device
from sightline.config import RunFile
from sightline.config.load import apply_overrides
from sightline.errors import ConfigError
from sightline.message import user
from sightline.run import RunDir

TURN_SLACK = 16
"""Extra tokens that a later turn may have: its number, and tokens that close a turn."""
SHAPE = ("rollouts", "group_size", "turns", "width", "height", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    parser.description = (
        "Plays `sightline rl` on one device, with rollouts that show a drawn page every turn. "
        "Prints tokens a second, every step's seconds, and for each process what it did or for "
        "whom it waited, and the least time that the device needs for this work; steps of the "
        "warm-up are left out of that."
    )
    add_options(
        parser, "model", "size", "device", "dtype", "dir",
        steps=10, warmup=1, rollouts=64, group_size=8, turns=4, width=640, height=480,
        max_tokens=64,
    )  # fmt: skip
    option("-o", "--output", type=Path, metavar="FILE", help="write what was measured as JSON")
    option("overrides", nargs="*", metavar="section.key=value", help="settings of the run")


def run(args: argparse.Namespace) -> int:
    if args.warmup >= args.steps or args.rollouts % args.group_size:
        raise ConfigError(
            "--steps must be larger than --warmup, and --rollouts a multiple of --group-size",
            f"change --steps {args.steps} --warmup {args.warmup} --rollouts {args.rollouts} "
            f"--group-size {args.group_size}",
        )
    name = str(args.model or args.size)
    with work_folder(args) as folder:
        print(f"playing {args.steps} steps", flush=True)
        results = {"model": name, **measure_loop(args, folder)}
    show(results)
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure_loop(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the loop in `folder`. Return its settings, its account and the device's limits."""
    file = run_file(args, folder)
    if len(file.server_names) != 1 or file.trainer.ranks != 1:
        raise ConfigError(
            f"the run file sets {len(file.server_names)} servers and {file.trainer.ranks} ranks",
            "set one of each: the benchmark accounts for the seconds of one device",
        )
    began = time.time()
    run_sightline("rl", folder / "loop.toml", config_module.dump_toml(file), "--plain")
    ended, run_dir = time.time(), RunDir(folder / "loop-001")
    account = account_loop(run_dir, args.steps, args.warmup)
    bound = bound_loop(run_dir, account, args.warmup)
    return {
        "device": pick_device(args.device),
        "dtype": file.model.dtype,
        "shape": {name: getattr(args, name) for name in SHAPE},
        "max_lag": file.orchestrator.max_lag,
        "warmup": args.warmup,
        **asdict(account),
        "start_s": account.began - began,
        "end_s": ended - account.ended,
        "bound": None if bound is None else asdict(bound),
    }


def run_file(args: argparse.Namespace, folder: Path) -> RunFile:
    store, renderer = open_renderer(args.model, folder / "media")
    page = store.put(Screenshots(1, args.width, args.height).draw(random.Random(0)))
    turn = len(renderer.render([user("page 0", page)]).token_ids) + args.max_tokens + TURN_SLACK
    shape = {"turns": args.turns, "width": args.width, "height": args.height, "shares_first": True}
    values: dict[str, Any] = {
        "run": {"name": "loop", "dir": str(folder), "steps": args.steps},
        "model": {"path": str(args.model.resolve()), "dtype": args.dtype},
        "env": {"name": SCREENSHOTS, "args": shape},
        "rollout": {"max_tokens": args.max_tokens},
        "orchestrator": {
            "group_size": args.group_size, "groups_per_step": args.rollouts // args.group_size,
            "diagnostics_every": 0,
        },
        "inference": {"device": args.device, "max_model_len": args.turns * turn},
        "trainer": {"device": args.device, "lr": 1e-6, "checkpoint_every": 1_000_000},
        "eval": {"tasks": 0},
    }  # fmt: skip
    apply_overrides(values, args.overrides)
    return config_module.validate_config(RunFile, values, "bench loop")


def show(found: dict[str, Any]) -> None:
    account = msgspec.convert(found, LoopAccount)
    wall_s, engine = account.wall_s, account.engine
    counted = account.step_s[found["warmup"] :]
    rows = []
    for process, parts in account.seconds.items():
        for name, seconds in parts.items():
            if name != OTHER or abs(seconds) >= 0.0005 * wall_s:
                rows.append([process, name, f"{seconds:.2f}", f"{seconds / wall_s:.1%}"])
            process = ""
    per_s = {
        name: getattr(account, f"tokens_{name}") / wall_s
        for name in ("sampled", "computed", "trained")
    }
    lines = [
        f"tokens/s: {per_s['sampled']:,.0f} sampled, {per_s['trained']:,.0f} of them trained, "
        f"{per_s['computed']:,.0f} computed by the trainer, context included",
        "seconds a step, the warm-up first: " + " ".join(f"{s:.2f}" for s in account.step_s),
        f"without the warm-up: median {statistics.median(counted):.2f}, {min(counted):.2f} to "
        f"{max(counted):.2f}; before the first step {found['start_s']:.1f} s, after the last "
        f"{found['end_s']:.1f} s",
        f"graphs compiled after the first step: {account.compilations}",
    ]
    if steps := engine.get("decode_steps"):
        lines.append(
            f"a decoding step: {engine['decode_seconds'] / steps * 1e3:.2f} ms, "
            f"{engine['decode_tokens'] / steps:.1f} rows, {engine['decode_keys'] / steps:,.0f} keys"
        )
    if account.in_use_s is not None:
        lines.append(
            f"from an optimizer step to its version in use: {account.in_use_s:.3f} s, of which the "
            f"server takes {account.adopt_s:.3f} s"
        )
    if found["bound"] is not None:
        bound = LoopBound(**found["bound"])
        lines.append(
            f"bound: {bound.total_s:.3g} s, {bound.total_s / wall_s:.1%} of the time: training "
            f"{bound.training_s:.3g} s and prefill {bound.prefill_s:.3g} s at "
            f"{bound.flops / 1e12:.3g} TFLOP/s, decode {bound.decode_s:.3g} s at "
            f"{bound.bandwidth / 1e9:,.0f} GB/s"
        )
    title = f"{len(counted)} steps, {wall_s:.2f} s"
    print_table(title, ("process", "activity", "seconds", "share"), rows, lines)
