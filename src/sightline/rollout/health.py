"""Checks whether a server is alive. Its event loop answers /health while the engine computes, and
reports how long the current step has taken."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from sightline.transport.http_client import RetryingClient


class ChangeSignal:
    """Wakes all waiters at the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next change, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass


@dataclass(frozen=True)
class ProbeTimes:
    """How often a server is probed, and when it counts as silent."""

    ask_every_s: float = 1.0
    timeout_s: float = 2.0
    """Maximum time of one answer."""
    silent_after_s: float = 5.0
    """Time without an answer, and at least two requests, after which the server is silent."""
    stuck_after_s: float = 600.0
    """Maximum time of one step. The first compiles, and prompts on a CPU are slow."""


DEFAULT_PROBE_TIMES = ProbeTimes()


class HealthProbe:
    """Distinguishes a server that is gone or unreachable from one that is slow."""

    def __init__(self, client: RetryingClient, times: ProbeTimes = DEFAULT_PROBE_TIMES) -> None:
        self._client, self._times = client, times
        self._num_missed, self._num_refused, self._since = 0, 0, time.monotonic()
        self.answer: dict[str, Any] = {}
        """The server's last /health answer; empty if it was not JSON."""
        self.stuck_s = 0.0
        """Seconds of the step that the engine is stuck in; 0 if it is not stuck."""

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._since if self._num_missed else 0.0

    @property
    def is_refused(self) -> bool:
        """Return whether the last connection was refused."""
        return self._num_refused > 0

    @property
    def is_silent(self) -> bool:
        # A refused connection means that the process is gone. A busy one lets connections wait.
        is_late = self._num_missed > 1 and self.silent_s >= self._times.silent_after_s
        return self._num_refused > 1 or is_late

    async def ask(self, pauses: bool = True) -> bool:
        """Probe once, after a pause. Return whether a server answered that is not stuck."""
        if pauses:
            await asyncio.sleep(self._times.ask_every_s)
        if not self._num_missed:
            self._since = time.monotonic()
        try:
            # Not `wait_for`, which may swallow a cancellation before Python 3.12.
            async with asyncio.timeout(self._times.timeout_s):
                data = await self._client.get("/health")
        except (OSError, aiohttp.ClientError) as error:
            self.stuck_s = 0.0
            self._num_missed += 1
            is_refused = isinstance(error, aiohttp.ClientConnectorError)
            self._num_refused = self._num_refused + 1 if is_refused else 0
            return False
        self._num_refused = 0
        try:
            health = json.loads(data)
        except ValueError:
            health = {}
        self.answer = health if isinstance(health, dict) else {}
        step_s = self.answer.get("step_s")
        if not isinstance(step_s, float) or step_s <= self._times.stuck_after_s:
            step_s = 0.0
        self.stuck_s = step_s
        self._num_missed = self._num_missed + 1 if self.stuck_s else 0
        return not self.stuck_s
