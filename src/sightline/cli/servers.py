"""`sightline servers`: the inference servers of a run, also while it goes on.

`add` gives it a server that runs already, as those of `[inference] servers` do; it is given turns
when it has adopted the newest version. `drain` gives one no further turns, `remove` lets it go:
what it was asked is asked elsewhere. `list` says how each stands. The list outlasts a resume.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.errors import ConfigError

ACTIONS = ("list", "add", "drain", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("action", nargs="?", default="list", choices=ACTIONS, help="what to do")
    parser.add_argument("url", nargs="?", default="", metavar="URL", help="http://HOST:PORT")


def run(args: argparse.Namespace) -> int:
    from sightline.config import RunFile, load_config
    from sightline.launch.servers import (
        add_server,
        describe_servers,
        list_servers,
        take_server,
    )
    from sightline.run.server_changes import DRAIN, REMOVE
    from sightline.view.run_files import get_run_dir
    from sightline.view.run_status import RUNNING, get_status

    run_dir, url = get_run_dir(args.run_dir), args.url.rstrip("/")
    config, state = load_config(RunFile, run_dir.config), get_status(run_dir).state
    if url and args.action == "list":
        raise ConfigError(f"sightline servers RUN list {url}", "write `list` alone")
    if not url and args.action != "list":
        raise ConfigError(
            f"sightline servers RUN {args.action} without the URL of a server",
            "write http://HOST:PORT behind it; the run has "
            + (", ".join(list_servers(run_dir, config)) or "none that it knows by its address"),
        )
    if args.action == "add":
        print(add_server(run_dir, config, url))
    elif args.action != "list":
        print(take_server(run_dir, config, url, DRAIN if args.action == "drain" else REMOVE))
    if state != RUNNING:
        print(f"the run is not going on, it is {state}: a resume would begin with")
    print(describe_servers(run_dir, config))
    return 0
