"""`sightline view`: show runs in a browser.

Serves a dashboard of run directories, live or finished. It answers this machine only, unless --host
names another address: then the printed link has a token.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="a run directory, or a folder that holds some",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="the address to bind (%(default)s)")
    parser.add_argument("--port", type=int, default=8700, help="0 takes a free one (%(default)s)")
    parser.add_argument("--token", help="the token to ask for, in place of one made up")


def run(args: argparse.Namespace) -> int:
    from sightline.errors import ConfigError
    from sightline.view.dashboard.serve import serve_dashboard

    if args.token == "":
        raise ConfigError("--token is empty", "give some letters, or leave it out")
    serve_dashboard(args.runs, args.host, args.port, args.token)
    return 0
