"""torch's TCPStore on a single address. By default it listens on all addresses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed as dist

from sightline.transport.listen import bind_socket


def listen_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Serve a store from this process. Port 0 picks a free port."""
    listening = bind_socket(host, port)
    port = listening.getsockname()[1]
    return _open(host, port, timeout_s, is_master=True, master_listen_fd=listening.detach())


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of another process, at host:port."""
    host, _, port = address.rpartition(":")
    return _open(host.strip("[]"), int(port), timeout_s, is_master=False)


def _open(host: str, port: int, timeout_s: float, **options: Any) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, wait_for_workers=False, timeout=timeout, **options)
