"""`sightline samples`: write rollouts as parquet files, with their images.

Write samples/step_N.parquet of a run: one row per rollout, with each image once. `--best` and
`--min-reward` select rollouts. `--pairs` writes one row per group instead: its best and its worst
rollout, for DPO.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--step", type=int, action="append", metavar="N", help="only this step; may be repeated"
    )
    parser.add_argument(
        "--max-image-mb", type=float, default=16.0,
        help="maximum MB of images per rollout (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--best",
        type=int,
        metavar="N",
        help="only the N rollouts of each group with the highest rewards",
    )
    parser.add_argument(
        "--min-reward", type=float, metavar="X", help="only rollouts with at least this reward"
    )
    parser.add_argument(
        "--pairs", action="store_true", help="write pairs for `sightline sft` with DPO to --to"
    )
    parser.add_argument(
        "--min-gap", type=float, default=0.0, metavar="X",
        help="only pairs whose rewards differ by at least this",
    )  # fmt: skip
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder, instead of RUN/samples")


def run(args: argparse.Namespace) -> int:
    from sightline.run import RunDir
    from sightline.view.parquet_export import Selection, export_samples

    if args.best is not None and args.best < 1:
        raise ConfigError(f"--best {args.best} selects no rollout", "set a positive number")
    is_selective = args.best is not None or args.min_reward is not None
    if args.pairs and (is_selective or args.to is None):
        raise ConfigError("--pairs needs --to, and no --best or --min-reward", "name a new folder")
    selection = Selection(args.best, args.min_reward, args.min_gap if args.pairs else None)
    what = "pairs" if args.pairs else "rollouts"
    if not 0 <= args.max_image_mb < 1e9:
        raise ConfigError(f"--max-image-mb {args.max_image_mb:g} is not a size", "set 0 or more")
    max_bytes = int(args.max_image_mb * 1e6)
    steps = export_samples(RunDir(args.run_dir), args.step, max_bytes, selection, args.to)
    num_selected = 0
    for name, counts in steps:
        num_selected += counts.rollouts
        print(
            f"{name}: {counts.rollouts} {what}, {counts.images} images, {counts.nbytes:,} bytes"
            + (f", {counts.left_out} images left out" if counts.left_out else "")
            + (f", {counts.unreadable} unreadable traces" if counts.unreadable else ""),
            flush=True,
        )
    if args.min_reward is not None and not num_selected:
        raise ConfigError(f"no rollout has a reward of {args.min_reward:g}", "lower --min-reward")
    if args.pairs and not num_selected:
        problem = f"no group has different rewards (--min-gap {args.min_gap:g})"
        raise ConfigError(problem, "lower --min-gap, or name a run with other rewards")
    return 0
