"""`sightline servers`: list and change the inference servers of a run.

The run must be running. `add` adds a server that is already running. It receives turns once it has
the newest version. `drain` sends a server no more turns. `remove` drops it, and its open requests
go to other servers. `list` prints the state of each. A resumed run keeps the list.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.errors import ConfigError

ACTIONS = ("list", "add", "drain", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("action", nargs="?", default="list", choices=ACTIONS, help="default: list")
    parser.add_argument("url", nargs="?", default="", metavar="URL", help="http://HOST:PORT")


def run(args: argparse.Namespace) -> int:
    from sightline.config import RunFile, load_config
    from sightline.launch.servers import add_server, describe_servers, list_servers, take_server
    from sightline.run.server_changes import DRAIN, REMOVE
    from sightline.view.run_files import get_run_dir
    from sightline.view.run_status import RUNNING, get_status

    run_dir, url = get_run_dir(args.run_dir), args.url.rstrip("/")
    config, state = load_config(RunFile, run_dir.config), get_status(run_dir).state
    if url and args.action == "list":
        raise ConfigError(f"`list` takes no URL, but {url} was given", "remove the URL")
    if not url and args.action != "list":
        raise ConfigError(
            f"`{args.action}` requires the URL of a server",
            "append http://HOST:PORT. The run has "
            + (", ".join(list_servers(run_dir, config)) or "no servers with a known URL"),
        )
    if args.action == "add":
        print(add_server(run_dir, config, url))
    elif args.action != "list":
        print(take_server(run_dir, config, url, DRAIN if args.action == "drain" else REMOVE))
    if state != RUNNING:
        print(f"the run is {state}. When resumed, it starts with")
    print(describe_servers(run_dir, config))
    return 0
