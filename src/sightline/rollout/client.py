"""Client for the generate protocol, and health probes for its server."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from sightline.compute.weight_transport import load_transport
from sightline.errors import EngineError
from sightline.transport.http_client import RetryingClient
from sightline.wire.codec import check_release
from sightline.wire.generate import (
    AdoptRequest,
    ErrorAnswer,
    GenerateRequest,
    GenerateResponse,
    LeaseRequest,
    check_answer,
    decode_answer,
)
from sightline.wire.weights import read_manifest


class LoopPacer:
    """Limits an event loop to one rollout's work per iteration, first come, first served.

    An event loop runs everything that is ready before it looks at its timers. If 200 rollouts get
    their answers at once, each with a millisecond of work, nothing else happens for 0.2 seconds.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait_for_pass(self) -> None:
        """Wait for an iteration of the loop that no other waiter shares."""
        async with self._lock:
            await asyncio.sleep(0)


@dataclass
class GenerateClient(RetryingClient):
    """Client for one server. A running generation has no time limit."""

    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """The client's processor settings. Errors show them next to the server's."""
    unreachable_fix: str = field(
        default="look at the inference server's log (logs/server.log if the run started it), and "
        "restart it",
        kw_only=True,
    )
    vocab_size: int = field(default=0, kw_only=True)
    """Exclusive upper bound for token ids in answers; 0 if unknown."""
    banned_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    """Token ids that no answer may contain: the renderer's pad tokens."""
    max_model_len: int = field(default=0, kw_only=True)
    """Maximum length of prompt and answer; 0 if unknown."""
    pacer: LoopPacer = field(default_factory=LoopPacer, kw_only=True)
    """Shared by all clients, so that they take turns on the event loop."""

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Send a request and return the validated answer."""
        answer = await self.request("POST", "/inference/v1/generate", msgspec.json.encode(request))
        await self.pacer.wait_for_pass()
        response = decode_answer(answer, GenerateResponse)
        check_answer(request, response, self.vocab_size, self.banned_token_ids, self.max_model_len)
        return response

    async def adopt(self, manifest: str) -> None:
        """Make the server adopt the weights of `manifest`, and return when it samples with them."""
        path = Path(manifest).absolute()  # the server may run in another folder
        content = read_manifest(path)
        sends = load_transport(content.transport).sends_manifest
        body = AdoptRequest(str(path), content if sends else None)
        await self.request("POST", "/sightline/v1/adopt", msgspec.json.encode(body))

    async def lease(self, run: str, seconds: float) -> None:
        """Let only `run` change the server's weights. Raise if another run holds the lease."""
        body = msgspec.json.encode(LeaseRequest(run, seconds))
        await self.request("POST", "/sightline/v1/lease", body)

    async def wait_healthy(self) -> None:
        """Wait until the server answers. Raise if it has a different version of Sightline.

        The launcher ends the run if it never answers.
        """
        try:
            health = json.loads(await self.wait_reachable("/health"))
        except ValueError:
            health = {}
        if health == {"status": "ok"}:  # the full answer requires the token
            fix = "set [inference] token, or --token"
            problem = f"the server at {self.base_url} rejects this token"
            raise EngineError(problem, fix, "unauthorized", 401)
        check_release(str(health.get("release", "")), f"the server at {self.base_url}")

    def read_error(self, status: int, data: bytes) -> EngineError:
        try:
            body = msgspec.json.decode(data, type=ErrorAnswer).error
        except msgspec.MsgspecError:
            return super().read_error(status, data)
        problem = body.message
        if body.type == "fingerprint" and self.settings:
            problem += f"; ours: {json.dumps(self.settings, sort_keys=True)}"
        return EngineError(
            problem, body.fix or "see docs/serving_api.md", kind=body.type, status=status
        )


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
    """Time limit for one answer."""
    silent_after_s: float = 5.0
    """Time without an answer after which a server counts as silent, if it missed two probes."""
    stuck_after_s: float = 600.0
    """Time limit for one step. Long, because the first step compiles and CPUs are slow."""


DEFAULT_PROBE_TIMES = ProbeTimes()


class HealthProbe:
    """Distinguishes a server that is gone or unreachable from one that is slow.

    A server's event loop answers /health while the engine computes, and reports how long the
    current step has taken.
    """

    def __init__(self, client: RetryingClient, times: ProbeTimes = DEFAULT_PROBE_TIMES) -> None:
        self._client, self._times = client, times
        self._num_missed, self._num_refused, self._since = 0, 0, time.monotonic()
        self.answer: dict[str, Any] = {}
        """The server's last /health answer. Empty if it was not JSON."""
        self.stuck_s = 0.0
        """Duration of the step that the engine is stuck in; 0 if it is not stuck."""

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._since if self._num_missed else 0.0

    @property
    def is_refused(self) -> bool:
        """Return whether the last connection was refused."""
        return self._num_refused > 0

    @property
    def is_silent(self) -> bool:
        # A refused connection means that the process is gone. A busy process accepts connections.
        is_late = self._num_missed > 1 and self.silent_s >= self._times.silent_after_s
        return self._num_refused > 1 or is_late

    async def ask(self, pauses: bool = True) -> bool:
        """Probe once, after a pause. Return whether the server answered and is not stuck."""
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
