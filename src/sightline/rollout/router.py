"""Which server a turn goes to, and where it goes when that one fails.

    turn --> choose --> server --answer--> trace
               ^          | gone, silent, refused for now, or behind in weights
               +----------+
      a turn waits for: a server that can take it     unblocked by: the list, a probe, a pause
      a probe runs for: requests under way, and a server that is lost

A request is complete in itself: a server that dies, hangs or is cut off costs a turn a second try
elsewhere. A rollout stays with the server that holds its keys and values, unless that is far
busier than another. The list of a run's servers comes from its orchestrator, with the version and
the load of each; without one all are as good as they answer.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from sightline.errors import EngineError
from sightline.rollout.client import GenerateClient
from sightline.rollout.health import DEFAULT_PROBE_TIMES, ChangeSignal, HealthProbe, ProbeTimes
from sightline.rollout.pacer import LoopPacer
from sightline.run.stages import NO_STAGE, Stage
from sightline.transport.http_client import UNREACHABLE
from sightline.wire.control import DRAINING, READY, ServerList, ServerStatus
from sightline.wire.generate import GenerateRequest, GenerateResponse
from sightline.wire.weights import parse_version_label

MAX_LOAD_DIFFERENCE = 64
MAX_LOAD_RATIO = 1.5
"""A rollout leaves its server where that has more requests than the idlest one by both (the
defaults of SGLang's cache-aware router)."""
BEHIND_PAUSE_S = 1.0
"""How long a server is left alone whose answer came from older weights than it should hold, or
that a turn found silent."""
MAX_LOST_SERVERS = 3
"""Servers that one turn may lose while they compute it: it may be what ends them."""
SERVERS_LOST = "servers_lost"


@dataclass(eq=False)
class RoutedServer:
    """A server as this process sees it."""

    client: GenerateClient
    status: ServerStatus
    is_lost: bool = False
    """Whether it did not answer, and has not since."""
    not_before: float = 0.0
    """When it may be asked again, by the monotonic clock."""
    pause_s: float = 0.0
    asking: set[asyncio.Task[GenerateResponse]] = field(default_factory=set)
    num_asking_then: int = 0
    """Requests of this process that the load of `status` includes."""
    probing: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Requests that the server has: by its last report, and of this process since."""
        return max(0, self.status.load - self.num_asking_then) + len(self.asking)

    def can_take(self, min_version: int) -> bool:
        version = self.status.version
        is_there = not self.is_lost and self.status.state != DRAINING
        return is_there and (version is None or version >= min_version)


@dataclass
class ServerRouter:
    """The servers that a process asks."""

    template: GenerateClient
    """How servers are spoken to. Its deadline bounds the time without one that can take a turn."""
    addresses: Sequence[str]
    """The servers to begin with."""
    added_token: str = field(default="", repr=False)
    """Token of servers that a list adds to those."""
    pinned_token: str = field(default="", repr=False)
    """Token of servers that are asked by name: those that a run starts beside the listed ones."""
    times: ProbeTimes = DEFAULT_PROBE_TIMES
    run: str = ""
    """Id of the run whose weights the servers hold; empty is not checked."""

    def __post_init__(self) -> None:
        self.changed = ChangeSignal()
        self._all: list[RoutedServer] = []
        """Every server that was ever asked: what was counted stays."""
        self._pinned: dict[str, RoutedServer] = {}
        self._unlisted: dict[str, RoutedServer] = {}
        """Those that have left the list, and may return to it."""
        self.servers = {
            url: self._open(ServerStatus(url), self.template.token) for url in self.addresses
        }

    @property
    def clients(self) -> list[GenerateClient]:
        return [server.client for server in self._all]

    def update(self, given: ServerList) -> None:
        """Takes the list of the orchestrator. What a server is asked that is not in it any more is
        asked elsewhere."""
        before, self.servers, self.run = self.servers, {}, given.run
        for status in given.servers:
            is_first = status.url in self.addresses or status.is_own
            token = self.template.token if is_first else self.added_token
            server = before.pop(status.url, None) or self._relist(status.url)
            server = server or self._open(status, token)
            server.status, server.num_asking_then = status, len(server.asking)
            self.servers[status.url] = server
        for url, server in before.items():
            _give_up(server)
            if server.probing is not None:
                server.probing.cancel()
                server.probing = None
            self._unlisted[url] = server
        self.changed.notify()

    def _relist(self, url: str) -> RoutedServer | None:
        """A server that was listed before: whoever lists it again has asked it."""
        server = self._unlisted.pop(url, None)
        if server is not None:
            server.is_lost = False
        return server

    def open_client(self, rollout_id: str, min_version: int = 0, pinned: str = "") -> RoutedClient:
        """The client of one rollout, which is for weights of `min_version` or newer; `pinned` is
        the one server that it asks."""
        if pinned and pinned not in self._pinned:
            self._pinned[pinned] = self._open(ServerStatus(pinned), self.pinned_token)
        return RoutedClient(self, rollout_id, min_version, pinned)

    def list_able(self, min_version: int, pinned: str) -> list[RoutedServer]:
        servers = [self._pinned[pinned]] if pinned else list(self.servers.values())
        return [server for server in servers if server.can_take(min_version)]

    async def check_answers(self, server: RoutedServer) -> bool:
        """Whether it answers now; one that does not is lost, or left alone for a while."""
        probe = HealthProbe(server.client, self.times)
        if await probe.ask(pauses=False):
            return True
        if probe.is_refused:
            self._lose(server)
        else:
            server.not_before = time.monotonic() + BEHIND_PAUSE_S
        return False

    async def ask(
        self, server: RoutedServer, request: GenerateRequest, min_version: int, turn: Stage
    ) -> GenerateResponse | EngineError:
        """The answer; or why the request goes elsewhere, or waits. Raises what cannot heal."""
        asking = asyncio.ensure_future(server.client.generate(request, turn))
        server.asking.add(asking)
        self._start_probing(server)
        try:
            await asyncio.wait({asking})  # a cancellation that arrives here is the rollout's own
        finally:
            server.asking.discard(asking)
            asking.cancel()
        url = server.client.base_url
        if asking.cancelled():
            problem = f"{url} does not answer: it was lost while it computed an answer"
            return EngineError(problem, server.client.unreachable_fix, UNREACHABLE, 503)
        error = asking.exception()
        if error is None:
            response = asking.result()
            if found := self._find_older_weights(response, min_version):
                server.not_before = time.monotonic() + BEHIND_PAUSE_S
                problem = f"{url} sampled with version {found}, {min_version} or newer is needed"
                return EngineError(problem, "wait until it has adopted it", "behind", 503)
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
        """The label of weights that are older than `min_version`, or of no run where the servers
        hold a run's: a server that was started again, and has not caught up."""
        for choice in response.choices:
            for span in choice.weight_versions or ():
                label = parse_version_label(span.version)
                if label.version < min_version or (self.run and not label.run):
                    return span.version
        return ""

    def _open(self, status: ServerStatus, token: str) -> RoutedServer:
        server = RoutedServer(self.template.for_server(status.url, token), status)
        self._all.append(server)
        return server

    def _lose(self, server: RoutedServer) -> None:
        server.is_lost = True
        _give_up(server)
        if self._unlisted.get(server.client.base_url) is not server:
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
    """Asks for the turns of one rollout."""

    router: ServerRouter
    rollout_id: str
    min_version: int = 0
    pinned: str = ""
    last: RoutedServer | None = None
    """The server that answered last, and holds the rollout's keys and values."""

    @property
    def pacer(self) -> LoopPacer:
        return self.router.template.pacer

    async def generate(self, request: GenerateRequest, turn: Stage = NO_STAGE) -> GenerateResponse:
        """The answer of whichever server gives one; raises when the router's deadline has passed
        since the first failure, or when the turn has cost too many servers.

        Once it has lost one, the next is asked whether it answers: only those that had the request
        count, and a network that fails costs no rollout."""
        give_up, problem, num_lost = math.inf, None, 0
        while True:
            server = self.find_server()
            if server is not None and (not num_lost or await self.router.check_answers(server)):
                found = await self.router.ask(server, request, self.min_version, turn)
                if isinstance(found, GenerateResponse):
                    self.last = server
                    return found
                problem = found
                server.client.counts.retries += 1
                num_lost += found.kind == UNREACHABLE
                if num_lost == MAX_LOST_SERVERS:
                    raise _build_lost_error(found)
            now = time.monotonic()
            give_up = min(give_up, now + self.router.template.deadline_s)
            pause_s = self._measure_pause(now)
            if now + (pause_s if math.isfinite(pause_s) else 0.0) >= give_up:
                raise problem or self._build_error()
            if pause_s:
                # Spread out, so that many who were refused together do not come back together.
                pause_s *= random.Random().uniform(1.0, 1.5)
                await self.router.changed.wait(min(pause_s, give_up - now))

    def find_server(self) -> RoutedServer | None:
        """The server that holds the rollout's keys and values, or the one with the fewest requests;
        None where none can take a turn now."""
        now = time.monotonic()
        able = self.router.list_able(self.min_version, self.pinned)
        able = [server for server in able if server.not_before <= now]
        # One that takes new weights in may let requests wait: another is better, if there is one.
        able = [server for server in able if server.status.state == READY] or able
        if not able:
            return None
        idlest = min(able, key=lambda server: (server.load, self._rank(server)))
        limit = max(idlest.load + MAX_LOAD_DIFFERENCE, idlest.load * MAX_LOAD_RATIO)
        if self.last in able and self.last is not None and self.last.load <= limit:
            return self.last
        return idlest

    def _rank(self, server: RoutedServer) -> int:
        """An order of the servers that differs from rollout to rollout."""
        return zlib.crc32(f"{self.rollout_id} {server.client.base_url}".encode())

    def _measure_pause(self, now: float) -> float:
        """Seconds until a server may be asked; infinite where none can take the turn."""
        able = self.router.list_able(self.min_version, self.pinned)
        return min((max(0.0, server.not_before - now) for server in able), default=math.inf)

    def _build_error(self) -> EngineError:
        asked = self.pinned or ", ".join(self.router.servers) or "none is listed"
        return EngineError(
            f"no inference server can take a turn for version {self.min_version} or newer: {asked}",
            self.router.template.unreachable_fix,
            UNREACHABLE,
            503,
        )


def _build_lost_error(last: EngineError) -> EngineError:
    return EngineError(
        f"{MAX_LOST_SERVERS} inference servers were lost while they computed this turn, so that it "
        f"is not asked for again; the last: {last.problem}",
        "look at the logs of the servers: its prompt or images may be what ends them",
        SERVERS_LOST,
    )
