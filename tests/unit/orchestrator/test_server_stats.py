"""A server that does not answer is the launcher's matter: asking it ends nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sightline.orchestrator.server_stats import ServerStatsPoller
from sightline.run import EventLog
from sightline.view.events import read_events


class Server:
    """A client whose server answers, or drops the connection."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer

    async def get(self, path: str) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError(),
        OSError("refused"),
        b"no json",
    ],
)
def test_a_server_that_does_not_answer_ends_nothing(
    tmp_path: Path, answer: bytes | Exception
) -> None:
    clients: Any = [Server(answer)]
    heartbeat = tmp_path / "server.beat"
    poller = ServerStatsPoller(clients, EventLog(tmp_path / "m", "orchestrator"), {}, heartbeat)
    asyncio.run(poller.poll())
    assert not heartbeat.exists() and not list(read_events(tmp_path / "m"))


def test_what_servers_answer_is_written_and_summed(tmp_path: Path) -> None:
    answer = b'{"busy": [[3, 4], [1, 2]], "totals": {"images_made": 2}, "now": {}}'
    clients: Any = [Server(answer), Server(answer)]
    caches: dict[str, dict[str, float]] = {}
    poller = ServerStatsPoller(clients, EventLog(tmp_path / "m", "orchestrator"), caches)
    asyncio.run(poller.poll())
    assert caches["server_pixels"]["misses"] == 4
    [busy] = read_events(tmp_path / "m")
    assert busy.values["intervals"] == [[1, 2], [1, 2], [3, 4], [3, 4]]
