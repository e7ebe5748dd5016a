"""`sightline export`: write a run's checkpoint for transformers and vLLM.

Export the newest complete checkpoint of a run, or the given one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline import config
from sightline.cli.config import detect_file_kind
from sightline.errors import ConfigError
from sightline.run import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="run directory, or RUN/checkpoints/step_N")
    parser.add_argument("target", type=Path, help="folder for the checkpoint")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")


def run(args: argparse.Namespace) -> int:
    from sightline.trainer.export import export_training_checkpoint, get_newest_checkpoint

    if args.target.exists() and not args.force:
        raise ConfigError(f"{args.target} already exists", "choose another folder, or add --force")
    is_run = (args.source / "config.toml").is_file()
    run_dir = RunDir(args.source if is_run else args.source.absolute().parents[1])
    if not run_dir.config.is_file():
        raise ConfigError(
            f"{args.source} is neither a run directory nor a checkpoint of a run",
            "pass the folder with config.toml, or its checkpoints/step_N",
        )
    checkpoint = get_newest_checkpoint(run_dir.checkpoints) if is_run else args.source
    settings = config.load_config(detect_file_kind(run_dir.config), run_dir.config)
    args.target.parent.mkdir(parents=True, exist_ok=True)
    export_training_checkpoint(checkpoint, settings, args.target)
    print(f"{checkpoint} -> {args.target}")
    return 0
