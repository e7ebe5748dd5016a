"""torch's TCPStore, listening at one address: by itself it would listen on all of the machine's."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist

from sightline.transport.listen import bind_socket


def listen_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store itself, in this process; port 0 takes a free one."""
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
    """The store of another process, at host:port."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host.strip("[]"),
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
