"""Serve the dashboard until it is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import uvicorn

from sightline.config.secret_refs import resolve_secret
from sightline.transport.http_server import RequestGuard, build_uvicorn_config, check_address
from sightline.transport.listen import bind_socket, check_tls, describe_link
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.server import build_app


def serve_dashboard(
    paths: Sequence[Path], host: str, port: int, token: str = "", cert: str = "", key: str = ""
) -> None:
    """Serve the runs at `paths`. `token` refers to a secret; `cert` and `key` are PEM files."""
    check_address(host, token, "--token")
    tls = check_tls(cert, key, host)
    guard = RequestGuard(host, resolve_secret(token, "--token"))
    runs = RunCollection(paths)
    listening = bind_socket(host, port)
    listening.listen(128)
    print(describe_link(host, listening.getsockname()[1], "/", has_tls=bool(tls)), flush=True)
    if token:
        print(f"open the address once with ?token= and the token from {token}", flush=True)
    config = build_uvicorn_config(
        build_app(runs, guard),
        # Browsers keep their event streams open. Do not wait for them.
        timeout_graceful_shutdown=1,
        **tls,
    )
    uvicorn.Server(config).run(sockets=[listening])
