"""torch's TCPStore on a single address. By default it listens on all addresses."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist

from sightline.transport.listen import bind_socket


def listen_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Serve a store from this process. Port 0 picks a free port."""
    listening = bind_socket(host, port)
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of another process, at host:port."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host.strip("[]"),
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
