"""The network fence of the tests: no connection leaves this machine, and attempts are recorded."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

PUBLIC = "93.184.216.34"


def by_socket() -> None:
    socket.create_connection((PUBLIC, 80), timeout=1)


def by_connect_ex() -> None:
    with socket.socket() as wire:
        wire.settimeout(1)
        wire.connect_ex((PUBLIC, 80))


def by_event_loop() -> None:
    asyncio.run(asyncio.open_connection(PUBLIC, 80))


def by_name() -> None:
    socket.getaddrinfo("pictures.example", 80)


@pytest.mark.parametrize("leave", [by_socket, by_connect_ex, by_event_loop, by_name])
def test_connection_to_another_machine_is_refused_and_recorded(
    leave: Any, only_here: list[str]
) -> None:
    with pytest.raises(ConnectionRefusedError, match="stays on this machine"):
        leave()
    where = "look up pictures.example" if leave is by_name else f"connect to {PUBLIC}"
    assert set(only_here) == {where}
    only_here.clear()


def test_local_machine_is_reachable_by_each_of_its_names(only_here: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            socket.create_connection((host, port), timeout=10).close()
    one, other = socket.socketpair()
    one.close()
    other.close()
    assert only_here == []
