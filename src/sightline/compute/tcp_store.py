"""torch's TCPStore on a single address. By default it listens on all addresses."""

from __future__ import annotations

from datetime import timedelta

import msgspec
from torch import distributed as dist

from sightline.transport.listen import bind_socket
from sightline.wire.rank_messages import Rendezvous

RENDEZVOUS_KEY = "sightline/run"
RENDEZVOUS_TIMEOUT_S = 600.0
"""Maximum time for rank 0 to check the run file and create the run directory."""


def listen_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Serve a store from this process; port 0 picks a free port."""
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


class RendezvousStore:
    """Torchrun's store, which tells ranks which run they belong to."""

    def __init__(self, host: str, port: int, is_master: bool) -> None:
        if is_master:
            self._store = listen_store(host, port, RENDEZVOUS_TIMEOUT_S)
        else:
            self._store = connect_store(f"{host}:{port}", RENDEZVOUS_TIMEOUT_S)

    def post(self, meeting: Rendezvous) -> None:
        self._store.set(RENDEZVOUS_KEY, msgspec.json.encode(meeting).decode())

    def read(self) -> Rendezvous:
        """Wait for rank 0's message and return it."""
        return msgspec.json.decode(self._store.get(RENDEZVOUS_KEY), type=Rendezvous)
