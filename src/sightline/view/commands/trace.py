"""`sightline trace`: read, export, compare and replay traces."""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.config.secret_refs import read_reference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the conversations of a trace")
    show.add_argument("--full", action="store_true", help="do not shorten long messages")
    export = actions.add_parser("export", help="print branches as JSON lines, images by reference")
    export.add_argument("--output", type=Path, metavar="FILE", help="write to this file")
    export.add_argument("--images", type=Path, metavar="DIR", help="copy the images here")
    differ = actions.add_parser(
        "diff", help="print the first difference of two files; exit with 1 if there is one"
    )
    replay = actions.add_parser(
        "replay", help="render and score traces again; exit with 1 if something differs"
    )
    replay.add_argument("--server", metavar="URL", help="score against this server")
    replay.add_argument(
        "--token", default="", metavar="REF", type=read_reference,
        help="the server's token: env:NAME or file:PATH",
    )  # fmt: skip
    replay.add_argument("--tolerance", type=float, default=1e-3, metavar="X",
                        help="allowed difference of a logprob (default: %(default)s)")  # fmt: skip
    for action in (show, export, differ, replay):
        action.add_argument("file", type=Path, metavar="FILE", help="a file in a run's traces/")
        if action is differ:
            action.add_argument("other", type=Path, metavar="OTHER")
        action.add_argument("--trace", metavar="ID", help="only this trace: its id, or its number")
    replay.add_argument("--model", type=Path, metavar="DIR", help="checkpoint (default: the run's)")
    for action in (export, replay):
        action.add_argument("--media", metavar="ROOT", help="store (default: the run's)")


def run(args: argparse.Namespace) -> int:
    from sightline.view import trace_commands

    return int(getattr(trace_commands, f"{args.action}_traces")(args))
