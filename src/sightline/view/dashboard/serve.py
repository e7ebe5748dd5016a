"""Binds the dashboard to an address and runs it until it is stopped."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from sightline.errors import ConfigError
from sightline.view.dashboard.access import is_loopback, make_token
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.server import build_app


def serve_dashboard(paths: Sequence[Path], host: str, port: int, token: str | None = None) -> None:
    runs = RunCollection(paths)
    if token is None and not is_loopback(host):
        token = make_token()
    listening = _bind_socket(host, port)
    name = f"[{host}]" if ":" in host else host
    query = f"?token={token}" if token else ""
    print(f"http://{name}:{listening.getsockname()[1]}/{query}", flush=True)
    config = uvicorn.Config(
        build_app(runs, token),
        log_level="warning",
        # A browser keeps its stream of events open; it is not waited for.
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listening])


def _bind_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            "choose another with --port, or 0 for a free one",
        ) from error
    listening.listen(128)
    return listening
