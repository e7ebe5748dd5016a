"""The inference servers of a run. Servers may come and go at any time.

    joining --lease--> catching up --adopt--> ready <--adopt--> updating
       ^                                        | silent, or restarted
       +----------------- lost <----------------+

      an update waits for: half of the available servers          unblocked by: their adopting
      a server waits to adopt while half of those ready do        unblocked by: them, a timeout
      the run ends: no server was ready for `outage_timeout_s`

Every server is leased to the run and adopts the newest version before it serves, even when it
returns after a failure. Updates are rolling, so a slow server does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.compute.weight_transport import load_transport
from sightline.errors import EngineError, SightlineError
from sightline.orchestrator.policies import UNKNOWN_VERSION
from sightline.rollout.client import (
    DEFAULT_PROBE_TIMES,
    ChangeSignal,
    GenerateClient,
    HealthProbe,
    ProbeTimes,
)
from sightline.run import EventLog
from sightline.run.server_changes import DRAIN, REMOVE, SERVE, Wanted
from sightline.transport.http_client import UNREACHABLE
from sightline.wire.control import DRAINING, READY, UPDATING, ServerList, ServerStatus
from sightline.wire.generate import WEIGHTS_UNAVAILABLE
from sightline.wire.weights import read_manifest

JOINING, CATCHING_UP, LOST, REFUSED = "joining", "catching up", "lost", "refused"
LEASE_S = 60.0
GIVE_BACK_S = 5.0
CANCEL_AGAIN_S = 1.0
STAGGER_S = 10.0
"""Maximum time that a server waits for others that are adopting."""
CHECK_EVERY_S = 0.2


@dataclass(eq=False)
class PooledServer:
    client: GenerateClient
    is_added: bool = False
    """Whether it was added during the run. If so, a refusal does not end the run."""
    name: str = ""
    """Process name of a server that reports its own address."""
    joined_file: Path | None = None
    """File to touch when it joins. The launcher restarts only servers that have joined."""
    state: str = JOINING
    is_draining: bool = False
    """Whether it gets no new requests."""
    manifest: str = ""
    """Path of the last manifest it adopted since it joined. Empty for none."""
    version: int = UNKNOWN_VERSION
    load: int = 0
    problem: str = ""
    """Reason why it is lost, refused or behind."""
    has_joined: bool = False
    lost_since: float = 0.0
    """When it was lost, by the monotonic clock; 0 while it is available."""
    task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.client.base_url

    @property
    def is_there(self) -> bool:
        """Return whether it takes part in updates."""
        return self.state in (CATCHING_UP, READY, UPDATING) and not self.is_draining

    @property
    def is_serving(self) -> bool:
        return self.state in (READY, UPDATING)

    @property
    def status(self) -> ServerStatus:
        state = DRAINING if self.is_draining and self.is_serving else self.state
        is_own = bool(self.name)
        return ServerStatus(self.url, state, self.version, self.load, is_own, self.problem)


@dataclass
class ServerPool:
    run: str
    """Id of the run. Leases belong to it, so a resumed run regains them at once."""
    events: EventLog
    clients: Sequence[GenerateClient]
    """Clients of the initial servers."""
    first_version: int = UNKNOWN_VERSION
    """Version of the initial servers: 0 for servers that the run starts."""
    outage_timeout_s: float = math.inf
    joined_file: Path | None = None
    """The `joined_file` of the initial servers."""
    times: ProbeTimes = DEFAULT_PROBE_TIMES
    renew_every_s: float = 10.0
    """Seconds between lease renewals."""
    rejoin_after_s: float = 5.0
    """Seconds before retrying a server that refused the run or could not fetch weights."""

    def __post_init__(self) -> None:
        self.changed = ChangeSignal()
        self.manifest, self.version = "", UNKNOWN_VERSION
        """The newest version, which every server should adopt."""
        self.servers = {
            client.base_url: PooledServer(client, joined_file=self.joined_file)
            for client in self.clients
        }
        self._ready_at = math.inf
        self._adopts_together = False
        """Whether the newest version is sent to all servers at the same time."""

    @property
    def status(self) -> ServerList:
        """The servers that workers may use."""
        serving = [server.status for server in self.servers.values() if server.is_serving]
        return ServerList(tuple(serving), self.run)

    def list_clients(self) -> list[GenerateClient]:
        """Return the clients of the servers in use."""
        return [server.client for server in self.servers.values() if server.is_serving]

    async def keep_serving(self) -> None:
        """Keep the servers joined and up to date, until cancelled.

        Raise if an initial server refuses the run, or if none is left.
        """
        try:
            while True:
                for server in list(self.servers.values()):
                    if server.task is None:
                        server.task = asyncio.ensure_future(self._keep(server))
                    elif server.task.done():
                        server.task.result()
                self._check_outage()
                await self.changed.wait(CHECK_EVERY_S)
        finally:
            tasks = [server.task for server in self.servers.values() if server.task is not None]
            await _cancel(*tasks)

    async def adopt(self, manifest: str) -> None:
        """Return when at least half of the available servers hold the version."""
        content = read_manifest(Path(manifest))
        self.manifest, self.version = manifest, content.version
        self._adopts_together = load_transport(content.transport).is_sent_once
        self.changed.notify()
        while True:
            there = [server for server in self.servers.values() if server.is_there]
            holding = [server for server in there if server.manifest == manifest]
            if there and 2 * len(holding) >= len(there):
                return
            await self.changed.wait()

    async def wait_joined(self) -> None:
        while not any(server.has_joined for server in self.servers.values()):
            await self.changed.wait()

    @property
    def reports(self) -> list[ServerStatus]:
        """The status of each server."""
        return [server.status for server in self.servers.values()]

    async def apply(
        self, wanted: Mapping[str, Wanted], build: Callable[[str], GenerateClient]
    ) -> None:
        """Add, drain and remove servers as `wanted`."""
        for url, want in wanted.items():
            if want == REMOVE and url in self.servers:
                await self.remove(url)
            elif want == SERVE and url not in self.servers:
                self.add(build(url))
            server = self.servers.get(url)
            if server is not None and server.is_draining != (want == DRAIN):
                self.drain(url, want == DRAIN)
        for url in [server.url for server in self.servers.values() if server.is_added]:
            if url not in wanted:
                await self.remove(url)

    def add(self, client: GenerateClient) -> None:
        self.servers[client.base_url] = PooledServer(client, is_added=True)
        self._tell(f"{client.base_url} is added: it gets requests when it has the newest version")

    async def place(self, name: str, client: GenerateClient, joined_file: Path) -> None:
        """Set the address of the run's server `name`, and remove its earlier address."""
        before = [server.url for server in self.servers.values() if server.name == name]
        if client.base_url in self.servers:  # previously another server's address, or its own
            await self.remove(client.base_url)
        self.servers[client.base_url] = PooledServer(client, name=name, joined_file=joined_file)
        self._tell(f"{client.base_url} is {name}")
        for url in before:
            if url != client.base_url and url in self.servers:
                await self.remove(url)

    def drain(self, url: str, is_draining: bool = True) -> None:
        """Stop sending a server new requests, or start again."""
        self.servers[url].is_draining = is_draining
        self._tell(f"{url} gets {'no new requests' if is_draining else 'requests again'}")

    async def remove(self, url: str) -> None:
        """Remove a server and return its lease. Other servers get its requests."""
        server = self.servers.pop(url)
        self._tell(f"{url} is removed")
        if server.task is not None:
            await _cancel(server.task)
        await give_back_lease(server.client, self.run)
        await server.client.close()

    async def close(self) -> None:
        for server in self.servers.values():
            await server.client.close()

    def _check_outage(self) -> None:
        """Raise if no server has been ready for too long. The first start has no time limit."""
        now = time.monotonic()
        if any(server.is_serving and not server.is_draining for server in self.servers.values()):
            self._ready_at = now
        if now - self._ready_at > self.outage_timeout_s:
            states = [
                f"{server.url} is {server.state}{f' ({server.problem})' * bool(server.problem)}"
                for server in self.servers.values()
            ]
            raise EngineError(
                f"no inference server was ready for {now - self._ready_at:.0f} s, [inference] "
                f"outage_timeout_s = {self.outage_timeout_s:.0f}: {'; '.join(states)}",
                "restart a server, or list others in [inference] servers, and resume the run",
                UNREACHABLE,
                503,
            )

    async def _keep(self, server: PooledServer) -> None:
        """Join the server, and rejoin it whenever it is lost."""
        while True:
            try:
                await self._join(server)
                await run_until_first(
                    self._watch(server), self._keep_adopting(server), self._keep_lease(server)
                )
            except SightlineError as error:
                is_away = isinstance(error, EngineError) and server.client.may_heal(error)
                if not is_away and not server.has_joined and not server.is_added:
                    raise
                if error.problem != server.problem:
                    self._tell(f"{server.url} is left out: {error.problem}")
                self._leave(server, LOST if is_away else REFUSED, error.problem)
                await asyncio.sleep(self.rejoin_after_s)

    async def _join(self, server: PooledServer) -> None:
        await server.client.wait_healthy()
        probe = HealthProbe(server.client, self.times)
        while server.lost_since and not await probe.ask():
            pass  # a server may answer although it is stuck
        await server.client.lease(self.run, LEASE_S)
        server.manifest = ""
        if server.joined_file is not None:
            server.joined_file.touch()
        if server.lost_since:
            away_s = time.monotonic() - server.lost_since
            self._tell(f"{server.url} answers again, after {away_s:.0f} s")
        server.has_joined, server.lost_since, server.problem = True, 0.0, ""
        server.version = UNKNOWN_VERSION
        if not self.manifest and not server.is_added:
            server.version = self.first_version
        self._set_state(server, CATCHING_UP if server.version == UNKNOWN_VERSION else READY)

    async def _watch(self, server: PooledServer) -> None:
        """Return when the server is silent or was restarted."""
        probe = HealthProbe(server.client, self.times)
        while not probe.is_silent:
            if await probe.ask():
                health = probe.answer
                load = int(health.get("running") or 0) + int(health.get("waiting") or 0)
                if load != server.load:
                    server.load = load
                    self.changed.notify()
                if health.get("leased_to", self.run) != self.run:
                    problem = "was restarted, or is leased to another run"
                    self._tell(f"{server.url} {problem}: other servers get its requests")
                    self._leave(server, LOST, problem)
                    return
        message = (
            f"{server.url} has not answered for {probe.silent_s:.0f} s. It has stopped, or its "
            "machine is unreachable. Other servers get its requests"
        )
        if probe.stuck_s:
            message = f"{server.url} has computed one step for {probe.stuck_s:.0f} s: it is stuck"
        self._tell(message)
        self._leave(server, LOST, "it is stuck" if probe.stuck_s else "it does not answer")

    async def _keep_adopting(self, server: PooledServer) -> None:
        while True:
            while server.manifest == self.manifest or server.is_draining:
                await self.changed.wait()
            await self._wait_for_others(server)
            manifest, version, before = self.manifest, self.version, server.state
            if before == READY:
                self._set_state(server, UPDATING)
            try:
                await server.client.adopt(manifest)
            except EngineError as error:
                if error.kind == WEIGHTS_UNAVAILABLE:
                    # The server keeps its version and tries again.
                    if error.problem != server.problem:
                        self._tell(
                            f"{server.url} cannot fetch version {version} yet: {error.problem}"
                        )
                    server.problem = error.problem
                    self._set_state(server, before)
                    await asyncio.sleep(self.rejoin_after_s)
                elif manifest == self.manifest:
                    raise
                continue  # a newer version exists, and this version's files are gone
            server.manifest, server.version, server.problem = manifest, version, ""
            self._set_state(server, READY)

    async def _wait_for_others(self, server: PooledServer) -> None:
        """Wait while half of the ready servers adopt, for at most `STAGGER_S`."""
        until = time.monotonic() + (0.0 if self._adopts_together else STAGGER_S)
        while server.state == READY and (left_s := until - time.monotonic()) > 0:
            serving = [other for other in self.servers.values() if other.is_serving]
            updating = [other for other in serving if other.state == UPDATING]
            if len(updating) < max(1, len(serving) // 2):
                return
            await self.changed.wait(left_s)

    async def _keep_lease(self, server: PooledServer) -> None:
        while True:
            await asyncio.sleep(self.renew_every_s)
            await server.client.lease(self.run, LEASE_S)

    def _leave(self, server: PooledServer, state: str, problem: str) -> None:
        server.lost_since = server.lost_since or time.monotonic()
        server.problem = problem
        self._set_state(server, state)

    def _set_state(self, server: PooledServer, state: str) -> None:
        server.state = state
        self.changed.notify()

    def _tell(self, message: str) -> None:
        self.events.write("process", words=message)
        self.changed.notify()


async def give_back_lease(client: GenerateClient, run: str) -> None:
    """Return a lease. A server that does not answer keeps it until it expires."""
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(GIVE_BACK_S):
            await client.lease(run, 0.0)


async def give_back_leases(servers: Sequence[str], token: str, run: str) -> None:
    for server in servers:
        client = GenerateClient(server, token=token)
        await give_back_lease(client, run)
        await client.close()


async def run_until_first(*jobs: Awaitable[object]) -> None:
    """Run all jobs until the first ends, cancel the others, and raise its error."""
    tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _cancel(*tasks)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    left = set(tasks)
    while left:  # cancel again, because a library may swallow one cancellation
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, because only the first task's error is raised
