"""`sightline sft`: supervised training on conversations, of a file or of an environment."""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline import config
from sightline.config import SftFile
from sightline.errors import ConfigError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sft",
        help="supervised training",
        description="Trains on conversations, of a file or of an environment. Overrides are "
        "written section.key=value.",
    )
    parser.add_argument("file", nargs="?", help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run directory")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sightline.launch.sft import resume_sft, start_sft

    if args.resume is not None:
        # With --resume there is no run file: every word is an override.
        resume_sft(args.resume, [word for word in [args.file, *args.overrides] if word])
        return 0
    if not args.file:
        raise ConfigError("no run file", "name one, or a run to go on with: --resume RUN")
    start_sft(config.load_config(SftFile, Path(args.file), args.overrides))
    return 0
