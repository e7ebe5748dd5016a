"""Whether a server answers: its event loop answers /health, whatever the engine computes, and says
since when it computes one step."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from sightline.transport.http_client import RetryingClient


class ChangeSignal:
    """Wakes all who wait for a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next change, or when `timeout_s` has passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass


@dataclass(frozen=True)
class ProbeTimes:
    """How often a server is asked, and when it counts as silent."""

    ask_every_s: float = 1.0
    timeout_s: float = 2.0
    """How long one answer may take."""
    silent_after_s: float = 5.0
    """How long there may be none before the server is silent; two requests at least."""
    stuck_after_s: float = 600.0
    """How long one step may take: the first compiles, and a step of prompts on a CPU is slow."""


DEFAULT_PROBE_TIMES = ProbeTimes()


class HealthProbe:
    """Tells a server that is gone, stopped or cut off from one that takes long over its answers."""

    def __init__(self, client: RetryingClient, times: ProbeTimes = DEFAULT_PROBE_TIMES) -> None:
        self._client, self._times = client, times
        self._num_missed, self._num_refused, self._since = 0, 0, time.monotonic()
        self.answer: dict[str, Any] = {}
        """What the server last said of itself; empty where that is not JSON."""
        self.stuck_s = 0.0
        """Seconds of the step that the engine is stuck in, by its last answer; or 0."""

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._since if self._num_missed else 0.0

    @property
    def is_refused(self) -> bool:
        """Whether nothing listened when it was last asked."""
        return self._num_refused > 0

    @property
    def is_silent(self) -> bool:
        # Where nothing listens the process is gone: a busy one lets connections wait.
        is_late = self._num_missed > 1 and self.silent_s >= self._times.silent_after_s
        return self._num_refused > 1 or is_late

    async def ask(self, pauses: bool = True) -> bool:
        """Asks once, after a pause; whether there was an answer of a server that is not stuck."""
        if pauses:
            await asyncio.sleep(self._times.ask_every_s)
        if not self._num_missed:
            self._since = time.monotonic()
        try:
            # Not `wait_for`, which before Python 3.12 may swallow the end of this task.
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
            found = json.loads(data)
        except ValueError:
            found = {}
        self.answer = found if isinstance(found, dict) else {}
        step_s = self.answer.get("step_s")
        if not isinstance(step_s, float) or step_s <= self._times.stuck_after_s:
            step_s = 0.0
        self.stuck_s = step_s
        self._num_missed = self._num_missed + 1 if self.stuck_s else 0
        return not self.stuck_s
