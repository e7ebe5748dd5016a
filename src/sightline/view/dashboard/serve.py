"""Binds the dashboard to an address and runs it until it is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import uvicorn

from sightline.transport.listen import bind_socket, describe_link
from sightline.view.dashboard.access import is_loopback, make_token
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.server import NOT_BUILT_MESSAGE, build_app, is_built


def serve_dashboard(paths: Sequence[Path], host: str, port: int, token: str | None = None) -> None:
    runs = RunCollection(paths)
    if token is None and not is_loopback(host):
        token = make_token()
    listening = bind_socket(host, port)
    listening.listen(128)
    query = f"/?token={token}" if token else "/"
    print(describe_link(host, listening.getsockname()[1], query), flush=True)
    if not is_built():
        print(NOT_BUILT_MESSAGE, flush=True)
    config = uvicorn.Config(
        build_app(runs, token),
        log_level="warning",
        # A browser keeps its stream of events open; it is not waited for.
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listening])
