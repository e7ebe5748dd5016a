"""A server that does not answer affects neither the run nor the others' statistics."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sightline.orchestrator.step_metrics import ServerStatsPoller
from sightline.run import EventLog
from sightline.view.events import read_events


class Server:
    """A client whose server answers, or drops the connection."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer, self.base_url = answer, f"http://{id(self)}"

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
def test_unresponsive_server_does_not_stop_stats(tmp_path: Path, answer: bytes | Exception) -> None:
    clients: Any = [Server(answer)]
    poller = ServerStatsPoller(lambda: clients, EventLog(tmp_path / "m", "orchestrator"))
    asyncio.run(poller.poll())
    assert not list(read_events(tmp_path / "m"))


def test_server_stats_are_written_and_summed(tmp_path: Path) -> None:
    counts = b'{"images_made": 2, "busy_seconds": 2, "decode_steps": 5}'
    answer = b'{"busy": [[3, 4], [1, 2]], "totals": ' + counts + b', "now": {}}'
    gone = Server(OSError("refused"))
    clients: Any = [Server(answer), gone, Server(answer)]
    poller = ServerStatsPoller(lambda: clients, EventLog(tmp_path / "m", "orchestrator"))
    asyncio.run(poller.poll())
    [busy] = read_events(tmp_path / "m")
    assert busy.values["intervals"] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert busy.values["totals"] == {"busy_seconds": 4, "decode_steps": 10}


@pytest.mark.parametrize("ahead_s", [-7200.0, 0.0, 7200.0])
def test_server_stats_use_the_local_clock(tmp_path: Path, ahead_s: float) -> None:
    class Apart(Server):
        async def get(self, path: str) -> bytes:
            now = time.time() + ahead_s
            since = float(path.partition("since=")[2])
            spans = [[now - 100, now - 90], [now - 5, now - 1]]
            stats = {"time": now, "busy": [span for span in spans if span[1] > since]}
            return json.dumps(stats).encode()

    clients: Any = [Apart(b"")]
    events = EventLog(tmp_path / "m", "orchestrator")
    poller = ServerStatsPoller(lambda: clients, events, since=time.time() - 50)
    asyncio.run(poller.poll())
    asyncio.run(poller.poll())
    [busy] = read_events(tmp_path / "m")  # once, and not what was before the run
    assert busy.values["intervals"] == [[pytest.approx(time.time() - 5, abs=60)] * 2]
