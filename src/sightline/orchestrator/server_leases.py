"""The run's right to change the weights of its servers, renewed for as long as the run lasts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sightline.errors import EngineError
from sightline.rollout.client import GenerateClient
from sightline.transport.http_client import UNREACHABLE

LEASE_S = 60.0
GIVE_BACK_S = 5.0


@dataclass
class ServerLeases:
    clients: Sequence[GenerateClient]
    run: str
    """Id of the run: a resumed one has its leases again at once."""
    renew_every_s: float = 10.0
    _taken: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, seconds: float = LEASE_S) -> None:
        """Raises where another run has one of the servers."""
        await asyncio.gather(*(client.lease(self.run, seconds) for client in self.clients))
        self._taken.set()

    async def run_when_taken(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs what has servers adopt: a trainer may publish before they are up and leased."""
        await self._taken.wait()
        await work()

    async def keep_renewing(self) -> None:
        """Raises when another run has taken a server meanwhile."""
        while True:
            await asyncio.sleep(self.renew_every_s)
            try:
                await self.take()
            except EngineError as error:
                if error.kind != UNREACHABLE:  # a server that is gone is the launcher's matter
                    raise


async def give_back_leases(servers: Sequence[str], token: str, run: str) -> None:
    """Lets other runs have the servers; one that does not answer keeps the lease until it ends."""
    for server in servers:
        client = GenerateClient(server, token=token)
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(client.lease(run, 0.0), GIVE_BACK_S)
        await client.close()
