"""Stores and groups of torch listen at the address that they are given, and at no other."""

from __future__ import annotations

import socket

import pytest

from sightline.compute.tcp_store import connect_store, listen_store

ELSEWHERE = "127.0.0.2"
"""Another address of this machine; who listens on all listens there, too."""


def check_refused(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ELSEWHERE, port), timeout=10)
    socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_a_store_listens_at_its_address_alone() -> None:
    store = listen_store("127.0.0.1", 0, timeout_s=30)
    check_refused(store.port)
    other = connect_store(f"127.0.0.1:{store.port}", timeout_s=30)
    other.set("key", "value")
    assert store.get("key") == b"value"
