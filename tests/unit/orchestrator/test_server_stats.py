"""A server that does not answer ends nothing, and is named."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sightline.orchestrator.server_stats import ServerHealthWatch, ServerStatsPoller
from sightline.rollout.client import GenerateClient
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


ANSWERS = """
import http.server, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/generate":
            time.sleep(1000)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_stopped_server_is_named_and_one_that_takes_long_is_not(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ANSWERS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    metrics, address = tmp_path / "m", f"http://127.0.0.1:{process.stdout.readline().strip()}"

    async def wait_for_lines(number: int) -> list[str]:
        while True:
            lines = [str(event.values["words"]) for event in read_events(metrics)]
            if len(lines) >= number:
                return lines
            await asyncio.sleep(0.02)

    async def watch() -> None:
        client = GenerateClient(address)
        events = EventLog(metrics, "orchestrator")
        watching = asyncio.ensure_future(
            ServerHealthWatch([client], events, 0.05, 0.5, 1.2).keep_watching()
        )
        generating = asyncio.ensure_future(client.get("/generate"))
        try:
            await asyncio.sleep(1.5)
            assert not list(read_events(metrics)), "a generation that is under way is no silence"
            process.send_signal(signal.SIGSTOP)
            [named] = await asyncio.wait_for(wait_for_lines(1), 60)
            assert named.startswith(f"{address} has not answered for ")
            process.send_signal(signal.SIGCONT)
            *_, back = await asyncio.wait_for(wait_for_lines(2), 60)
            assert back.startswith(f"{address} answers again, after ")
            assert not generating.done()
        finally:
            for task in (watching, generating):
                task.cancel()
            await asyncio.gather(watching, generating, return_exceptions=True)
            await client.close()

    try:
        asyncio.run(watch())
    finally:
        process.kill()
        process.communicate()
