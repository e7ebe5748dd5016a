"""Choose a server for each turn, and another one if it fails.

    turn --> choose --> server --answer--> trace
               ^          | gone, silent, overloaded, or behind in weights
               +----------+
      a turn waits for: a server that can take it     unblocked by: the list, a probe, a timer
      a probe runs for: requests in flight, and a lost server

Requests are self-contained, so a turn can be retried on another server. A rollout stays with the
server that holds its KV cache, unless that server is much busier than another. The orchestrator
sends a list of the run's servers with their versions and loads. Without a list, all servers that
answer are treated alike.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sightline.errors import EngineError
from sightline.rollout.client import (
    DEFAULT_PROBE_TIMES,
    ChangeSignal,
    GenerateClient,
    HealthProbe,
    LoopPacer,
    ProbeTimes,
)
from sightline.transport.http_client import UNREACHABLE
from sightline.wire.control import DRAINING, READY, ServerList, ServerStatus
from sightline.wire.generate import GenerateRequest, GenerateResponse
from sightline.wire.weights import parse_version_label

MAX_LOAD_DIFFERENCE = 64
MAX_LOAD_RATIO = 1.5
"""A rollout leaves its server if the server's load exceeds that of the least busy one by both
measures (the defaults of SGLang's cache-aware router)."""
BEHIND_PAUSE_S = 1.0
"""Pause before the next request to a server that was silent or answered with old weights."""
MAX_LOST_SERVERS = 3
"""Maximum number of servers that one turn may lose, since the turn itself may crash them."""
SERVERS_LOST = "servers_lost"


@dataclass(eq=False)
class RoutedServer:
    """A server's state, as known to this process."""

    client: GenerateClient
    status: ServerStatus
    is_lost: bool = False
    """Whether it stopped answering."""
    not_before: float = 0.0
    """Earliest time of the next request, on the monotonic clock."""
    pause_s: float = 0.0
    asking: set[asyncio.Task[GenerateResponse]] = field(default_factory=set)
    num_asking_then: int = 0
    """Number of this process's requests that `status.load` includes."""
    probing: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Number of requests on the server: its last reported load plus this process's changes."""
        return max(0, self.status.load - self.num_asking_then) + len(self.asking)

    def can_take(self, min_version: int) -> bool:
        version = self.status.version
        is_there = not self.is_lost and self.status.state != DRAINING
        return is_there and (version is None or version >= min_version)


@dataclass
class ServerRouter:
    """The servers that a process's rollouts use."""

    template: GenerateClient
    """Template for all clients. Its deadline limits how long a turn waits for a server."""
    addresses: Sequence[str]
    """Addresses of the initial servers."""
    added_token: str = field(default="", repr=False)
    """Token for servers that the orchestrator's list adds."""
    pinned_token: str = field(default="", repr=False)
    """Token for servers that requests are pinned to, such as the evaluator."""
    times: ProbeTimes = DEFAULT_PROBE_TIMES
    run: str = ""
    """Id of the run whose weights the servers hold. Empty skips the check."""

    def __post_init__(self) -> None:
        self.changed = ChangeSignal()
        self._all: list[RoutedServer] = []
        """All servers ever opened."""
        self._pinned: dict[str, RoutedServer] = {}
        self._unlisted: dict[str, RoutedServer] = {}
        """Servers that were removed from the list and may return."""
        self.servers = {
            url: self._open(ServerStatus(url), self.template.token) for url in self.addresses
        }

    def update(self, server_list: ServerList) -> None:
        """Apply the orchestrator's list. Requests to removed servers move to other servers."""
        before, self.servers, self.run = self.servers, {}, server_list.run
        for status in server_list.servers:
            is_first = status.url in self.addresses or status.is_own
            token = self.template.token if is_first else self.added_token
            server = before.pop(status.url, None) or self._unlisted.pop(status.url, None)
            server = server or self._open(status, token)
            server.status, server.num_asking_then = status, len(server.asking)
            self.servers[status.url] = server
        for url, server in before.items():
            _give_up(server)
            if server.probing is not None:
                server.probing.cancel()
                server.probing = None
            # If it returns, the orchestrator has checked that it answers.
            server.is_lost = False
            self._unlisted[url] = server
        self.changed.notify()

    def open_client(self, rollout_id: str, min_version: int = 0, pinned: str = "") -> RoutedClient:
        """Return a client for one rollout, for weights of `min_version` or newer.

        `pinned` is the only server that the client may use. Empty for any server.
        """
        if pinned and pinned not in self._pinned:
            self._pinned[pinned] = self._open(ServerStatus(pinned), self.pinned_token)
        return RoutedClient(self, rollout_id, min_version, pinned)

    def list_able(self, min_version: int, pinned: str) -> list[RoutedServer]:
        servers = [self._pinned[pinned]] if pinned else list(self.servers.values())
        return [server for server in servers if server.can_take(min_version)]

    async def check_answers(self, server: RoutedServer) -> bool:
        """Return whether a server answers. If not, mark it as lost or pause it."""
        probe = HealthProbe(server.client, self.times)
        if await probe.ask(pauses=False):
            return True
        if probe.is_refused:
            self._lose(server)
        else:
            server.not_before = time.monotonic() + BEHIND_PAUSE_S
        return False

    async def ask(
        self, server: RoutedServer, request: GenerateRequest, min_version: int
    ) -> GenerateResponse | EngineError:
        """Return the answer, or an error that a retry may fix. Raise other errors."""
        asking = asyncio.ensure_future(server.client.generate(request))
        server.asking.add(asking)
        self._start_probing(server)
        try:
            await asyncio.wait({asking})  # a cancellation here cancels the rollout
        finally:
            server.asking.discard(asking)
            asking.cancel()
        url = server.client.base_url
        if asking.cancelled():
            problem = f"{url} was lost while it computed an answer"
            return EngineError(problem, server.client.unreachable_fix, UNREACHABLE, 503)
        error = asking.exception()
        if error is None:
            response = asking.result()
            if label := self._find_older_weights(response, min_version):
                server.not_before = time.monotonic() + BEHIND_PAUSE_S
                problem = (
                    f"{url} sampled with version {label}, but {min_version} or newer is needed"
                )
                return EngineError(problem, "wait until it has adopted the version", "behind", 503)
            server.pause_s = 0.0
            return response
        if not isinstance(error, EngineError) or not server.client.may_heal(error):
            raise error
        if error.kind == UNREACHABLE:
            self._lose(server)
        else:
            first_s, longest_s = self.template.first_retry_s, self.template.longest_retry_s
            server.pause_s = min(max(first_s, 2 * server.pause_s), longest_s)
            server.not_before = time.monotonic() + max(server.pause_s, error.retry_after_s)
        return error

    def _find_older_weights(self, response: GenerateResponse, min_version: int) -> str:
        """Return the first version label that is older than `min_version` or has no run, if any.

        A restarted server has such weights until it adopts the current version.
        """
        for choice in response.choices:
            for span in choice.weight_versions or ():
                label = parse_version_label(span.version)
                if label.version < min_version or (self.run and not label.run):
                    return span.version
        return ""

    def _open(self, status: ServerStatus, token: str) -> RoutedServer:
        # Without retries: the router may choose another server.
        client = replace(self.template, base_url=status.url, token=token, max_tries=1)
        server = RoutedServer(client, status)
        self._all.append(server)
        return server

    def _lose(self, server: RoutedServer) -> None:
        if self._unlisted.get(server.client.base_url) is server:
            return
        server.is_lost = True
        _give_up(server)
        self._start_probing(server)
        self.changed.notify()

    def _start_probing(self, server: RoutedServer) -> None:
        if server.probing is None or server.probing.done():
            server.probing = asyncio.ensure_future(self._probe(server))

    async def _probe(self, server: RoutedServer) -> None:
        probe = HealthProbe(server.client, self.times)
        while server.asking or server.is_lost:
            is_answered = await probe.ask()
            if is_answered and server.is_lost:
                server.is_lost = False
                self.changed.notify()
            elif probe.is_silent and not server.is_lost:
                self._lose(server)

    async def close(self) -> None:
        for server in self._all:
            if server.probing is not None:
                server.probing.cancel()
            await server.client.close()


def _give_up(server: RoutedServer) -> None:
    for asking in server.asking:
        asking.cancel()


@dataclass
class RoutedClient:
    router: ServerRouter
    rollout_id: str
    min_version: int = 0
    pinned: str = ""
    last: RoutedServer | None = None
    """The server that answered last. It holds the rollout's KV cache."""

    @property
    def pacer(self) -> LoopPacer:
        return self.router.template.pacer

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return a server's answer. Raise after the router's deadline or too many lost servers.

        After losing a server, the client probes the next one before it sends the request. Only
        servers that received the request count as lost, so network failures fail no rollout.
        """
        give_up, problem, num_lost = math.inf, None, 0
        while True:
            server = self.find_server()
            if server is not None and (not num_lost or await self.router.check_answers(server)):
                result = await self.router.ask(server, request, self.min_version)
                if isinstance(result, GenerateResponse):
                    self.last = server
                    return result
                problem = result
                num_lost += result.kind == UNREACHABLE
                if num_lost == MAX_LOST_SERVERS:
                    raise EngineError(
                        f"{num_lost} inference servers were lost while they computed this turn. It "
                        f"is not retried. The last error: {result.problem}",
                        "look at the servers' logs: the turn's prompt or images may crash them",
                        SERVERS_LOST,
                    )
            now = time.monotonic()
            give_up = min(give_up, now + self.router.template.deadline_s)
            pause_s = self._measure_pause(now)
            if now + (pause_s if math.isfinite(pause_s) else 0.0) >= give_up:
                raise problem or self._build_error()
            if pause_s:
                # Add jitter, so that requests that were refused together are not retried together.
                pause_s *= random.Random().uniform(1.0, 1.5)
                await self.router.changed.wait(min(pause_s, give_up - now))

    def find_server(self) -> RoutedServer | None:
        """Return the server with the rollout's KV cache or the least busy one. Return None if no
        server can take a turn now."""
        now = time.monotonic()
        able = self.router.list_able(self.min_version, self.pinned)
        able = [server for server in able if server.not_before <= now]
        # Prefer servers that are not adopting weights: adopting would delay the turn.
        able = [server for server in able if server.status.state == READY] or able
        if not able:
            return None
        idlest = min(able, key=lambda server: (server.load, self._rank(server)))
        limit = max(idlest.load + MAX_LOAD_DIFFERENCE, idlest.load * MAX_LOAD_RATIO)
        if self.last in able and self.last is not None and self.last.load <= limit:
            return self.last
        return idlest

    def _rank(self, server: RoutedServer) -> int:
        """Return a tie-breaker that differs between rollouts."""
        return zlib.crc32(f"{self.rollout_id} {server.client.base_url}".encode())

    def _measure_pause(self, now: float) -> float:
        """Return the seconds until a server may get a request, or infinity if none can take it."""
        able = self.router.list_able(self.min_version, self.pinned)
        return min((max(0.0, server.not_before - now) for server in able), default=math.inf)

    def _build_error(self) -> EngineError:
        servers = self.pinned or ", ".join(self.router.servers) or "none is listed"
        return EngineError(
            f"no inference server has version {self.min_version} or newer: {servers}",
            self.router.template.unreachable_fix,
            UNREACHABLE,
            503,
        )
