"""`sightline view`: show runs in a browser.

Serve a dashboard of run directories, live or finished. It answers only this machine, unless --host
sets another address, which requires a token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.config.secret_refs import read_reference
from sightline.errors import ConfigError
from sightline.transport.listen import add_listen_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="a run directory, or a folder of runs",
    )  # fmt: skip
    add_listen_options(parser, 8700)
    parser.add_argument(
        "--token", default="", metavar="REF", type=read_reference,
        help="the token that clients must send: env:NAME or file:PATH",
    )  # fmt: skip
    parser.add_argument(
        "--export", type=Path, metavar="FILE",
        help="write one run to an HTML file that opens without a server, and exit",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.export is not None:
        from sightline.view.dashboard.export import export_run
        from sightline.view.run_files import get_run_dir

        if len(args.runs) != 1:
            raise ConfigError("--export writes one run", "pass one run directory")
        print(export_run(get_run_dir(args.runs[0]), args.export))
        return 0
    from sightline.view.dashboard.server import serve_dashboard

    serve_dashboard(args.runs, args.host, args.port, args.token, args.tls_cert, args.tls_key)
    return 0
