"""torch's stores and process groups listen only at the given address."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sightline.compute.broadcast import Broadcaster
from sightline.compute.tcp_store import connect_store, listen_store
from sightline.launch.processes import reserve_port
from sightline.launch.torchrun import (
    RENDEZVOUS_KEY,
    TorchrunContext,
    get_rendezvous_store,
    read_rendezvous,
)
from sightline.wire.rank_messages import Rendezvous

ELSEWHERE = "127.0.0.2"
"""Another address of this machine. A listener on all interfaces would listen there too."""


def check_refused(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ELSEWHERE, port), timeout=10)
    socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_tcp_store_listens_only_on_its_address() -> None:
    store = listen_store("127.0.0.1", 0, timeout_s=30)
    check_refused(store.port)
    other = connect_store(f"127.0.0.1:{store.port}", timeout_s=30)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_weights_are_broadcast_only_on_the_trainers_address(tmp_path: Path) -> None:
    sender = Broadcaster(tmp_path, "127.0.0.1")
    check_refused(int(sender.address.rpartition(":")[2]))


def test_rank_rendezvous_listens_only_on_its_address() -> None:
    port = reserve_port("127.0.0.1", 0, "test")
    meeting = Rendezvous("run", "127.0.0.1:1", "tcp://127.0.0.1:2")
    lead = TorchrunContext(0, 2, 2, "127.0.0.1", port, has_store=False)
    get_rendezvous_store(lead).set(RENDEZVOUS_KEY, msgspec.json.encode(meeting).decode())
    check_refused(port)
    assert read_rendezvous(replace(lead, rank=1)) == meeting
