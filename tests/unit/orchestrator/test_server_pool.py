"""Servers join, adopt versions, get lost and return. The pool waits for none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from small_server import SmallServer, until

from sightline.compute.weights import write_weights
from sightline.errors import EngineError, ResumeRefused
from sightline.orchestrator.server_pool import ServerPool
from sightline.rollout.client import GenerateClient, ProbeTimes
from sightline.run import EventLog, RunDir
from sightline.run.server_changes import DRAIN, REMOVE, SERVE, change_server, list_wanted
from sightline.view.events import read_events
from sightline.wire.control import DRAINING, READY, UPDATING

PATIENT = ProbeTimes(ask_every_s=0.05, timeout_s=60.0, silent_after_s=60.0)
"""Times for a busy machine, where answers are slow. A closed port is noticed at once."""
QUICK = ProbeTimes(ask_every_s=0.05, timeout_s=0.5, silent_after_s=0.5)
RUN = "beef"
ADOPT = "/sightline/v1/adopt"


class Scene:
    """A pool and its servers, and what the run published."""

    def __init__(
        self,
        folder: Path,
        servers: list[SmallServer],
        times: ProbeTimes = PATIENT,
        deadline_s: float = 1.0,
        is_empty: bool = False,
        **more: Any,
    ) -> None:
        self.folder, self.servers = folder, servers
        clients = [GenerateClient(server.url, deadline_s=deadline_s) for server in servers]
        clients = [] if is_empty else clients
        events = EventLog(folder / "m", "orchestrator")
        self.pool = ServerPool(RUN, events, clients, times=times, **more)

    def publish(self, version: int) -> str:
        tensors = {"a": torch.full((1,), float(version))}
        path, _ = write_weights(self.folder / "weights", tensors, version, 0, run=RUN)
        return str(path)

    def states(self) -> list[str]:
        listed = {status.url: status.state for status in self.pool.status.servers}
        return [listed.get(server.url, "") for server in self.servers]

    async def until(self, *states: str) -> None:
        while self.states() != list(states):
            await self.pool.changed.wait(0.05)

    def words(self) -> list[str]:
        return [str(event.values["words"]) for event in read_events(self.folder / "m")]


def play(
    folder: Path, scene: Callable[[Scene], Awaitable[None]], num: int = 2, **more: Any
) -> None:
    async def whole() -> None:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(SmallServer()) for _ in range(num)]
            one = Scene(folder, servers, **more)
            keeping = asyncio.ensure_future(one.pool.keep_serving())
            try:
                playing = asyncio.ensure_future(scene(one))
                async with asyncio.timeout(60):
                    await asyncio.wait({keeping, playing}, return_when="FIRST_COMPLETED")
                playing.cancel()
                await asyncio.gather(*([playing] if playing.done() else [keeping]))
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
                await one.pool.close()

    asyncio.run(whole())


def test_leased_servers_get_turns_once_they_hold_the_runs_weights(tmp_path: Path) -> None:
    async def scene(one: Scene) -> None:
        a, b = one.servers
        await one.pool.wait_joined()
        assert one.states() == ["", ""], "they hold whatever they hold"
        await one.pool.adopt(one.publish(0))
        await one.until(READY, READY)
        assert a.leased_to == b.leased_to == RUN
        assert [status.version for status in one.pool.status.servers] == [0, 0]
        await one.pool.remove(a.url)
        assert a.leased_to == "" and one.states() == ["", READY]

    play(tmp_path, scene)


def test_rolling_update_does_not_wait_for_the_slowest_server(tmp_path: Path) -> None:
    async def scene(one: Scene) -> None:
        a, b, c, d = one.servers
        await one.until(READY, READY, READY, READY)
        for server in one.servers:
            server.adopts.clear()
        adopting = asyncio.ensure_future(one.pool.adopt(one.publish(1)))
        await until(lambda: sum(server.asked[ADOPT] for server in one.servers) == 2)
        await asyncio.sleep(0.1)
        assert sorted(one.states()) == [READY, READY, UPDATING, UPDATING], "half at a time"
        assert not adopting.done()
        slow = next(server for server in one.servers if server.asked[ADOPT])
        for server in one.servers:
            if server is not slow:
                server.adopts.set()
        await adopting
        versions = {status.url: status.version for status in one.pool.status.servers}
        assert versions[slow.url] == 0 and sorted(versions.values())[-2:] == [1, 1]
        await one.pool.adopt(one.publish(2))
        assert slow.adopted == [] and one.pool.servers[slow.url].state == UPDATING
        slow.adopts.set()
        await until(lambda: one.pool.servers[slow.url].version == 2)
        assert slow.adopted[-1] == "v000002"

    play(tmp_path, scene, num=4, first_version=0)


@pytest.mark.parametrize("how", ["dies", "hangs", "is started again"])
def test_returning_server_is_readmitted_after_catching_up(tmp_path: Path, how: str) -> None:
    async def scene(one: Scene) -> None:
        a, b = one.servers
        await one.pool.adopt(one.publish(1))
        await one.until(READY, READY)
        if how == "dies":
            await a.end()
        elif how == "hangs":
            a.answers.clear()
        else:
            a.adopts.clear()
            await a.restart()
        await one.until("", READY)
        await one.pool.adopt(one.publish(2))
        if how == "dies":
            await a.restart()
        a.answers.set()
        a.adopts.set()
        await one.until(READY, READY)
        assert a.adopted[-1] == "v000002" and a.leased_to == RUN
        assert one.pool.servers[a.url].version == 2
        if how != "is started again":
            lost, back = [line for line in one.words() if line.startswith(a.url)][-2:]
            assert "It has stopped" in lost and "answers again, after" in back

    play(tmp_path, scene, times=QUICK if how == "hangs" else PATIENT)


def test_restarted_server_gets_the_version_that_it_held_again(tmp_path: Path) -> None:
    """Its weights are gone, although it has adopted the newest version before."""

    async def scene(one: Scene) -> None:
        a, _ = one.servers
        newest = one.publish(1)
        await one.pool.adopt(newest)
        await one.until(READY, READY)
        held = a.label
        await a.restart()
        await until(lambda: a.adopted == ["v000001"] * 2)
        await one.until(READY, READY)
        assert a.label == held and one.pool.servers[a.url].manifest == newest

    play(tmp_path, scene)


def test_loss_of_all_servers_ends_the_run_with_one_cause(tmp_path: Path) -> None:
    async def scene(one: Scene) -> None:
        await one.until(READY, READY)
        for server in one.servers:
            await server.end()
        await asyncio.sleep(60)

    with pytest.raises(EngineError) as caught:
        play(tmp_path, scene, first_version=0, outage_timeout_s=0.3)
    assert "no inference server was ready for" in caught.value.problem
    assert caught.value.problem.count("is lost (") == 2


def test_server_of_another_run_ends_the_start_and_is_later_skipped(
    tmp_path: Path,
) -> None:
    class Taken(SmallServer):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.leased_to = "another"

    async def whole() -> None:
        async with Taken() as other:
            one = Scene(tmp_path, [other], first_version=0)
            try:
                await asyncio.wait_for(one.pool.keep_serving(), 60)
            finally:
                await one.pool.close()

    with pytest.raises(EngineError, match="leased to another"):
        asyncio.run(whole())

    async def added(one: Scene) -> None:
        (a,) = one.servers
        await one.until(READY)
        async with Taken() as other:
            one.pool.add(GenerateClient(other.url))
            await until(lambda: "leased to another" in " ".join(one.words()))
            assert one.states() == [READY]
            other.leased_to = ""
            await one.pool.adopt(one.publish(1))
            await until(lambda: one.pool.servers[other.url].state == READY)
            assert other.leased_to == RUN and other.adopted == ["v000001"]
            one.pool.drain(other.url)
            states = {status.url: status.state for status in one.pool.status.servers}
            assert states == {a.url: READY, other.url: DRAINING}
            await one.pool.adopt(one.publish(2))
            assert other.adopted == ["v000001"]
            await one.pool.remove(other.url)

    (tmp_path / "later").mkdir()
    play(tmp_path / "later", added, num=1, first_version=0, rejoin_after_s=0.05)


def test_requested_server_changes_are_stored_and_applied(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()

    async def scene(one: Scene) -> None:
        a, b = one.servers
        base = (a.url, b.url)

        async def apply() -> None:
            await one.pool.apply(list_wanted(run_dir, base), lambda url: GenerateClient(url))

        await one.until(READY, READY)
        async with SmallServer() as c:
            change_server(run_dir, base, c.url, SERVE)
            change_server(run_dir, base, a.url, DRAIN)
            await apply()
            await one.pool.adopt(one.publish(1))
            await one.until(DRAINING, READY)
            await until(lambda: one.pool.servers[c.url].state == READY)
            assert [report.state for report in one.pool.reports] == [DRAINING, READY, READY]
            change_server(run_dir, base, a.url, REMOVE)
            await apply()
            assert list(one.pool.servers) == [b.url, c.url] and a.leased_to == ""
            change_server(run_dir, base, a.url, SERVE)
            change_server(run_dir, base, c.url, REMOVE)
            await apply()
            assert sorted(one.pool.servers) == sorted(base) and c.leased_to == ""
            await one.until(READY, READY)
        assert list_wanted(run_dir, base) == {a.url: SERVE, b.url: SERVE}
        change_server(run_dir, base, b.url, REMOVE)
        assert list_wanted(run_dir, base)[b.url] == REMOVE
        assert list_wanted(run_dir, (b.url,)) == {b.url: SERVE}, "of another run file"

    play(tmp_path, scene, first_version=0)
    data = run_dir.servers.read_bytes()
    run_dir.servers.write_bytes(data.replace(b"remove", b"remofe"))
    with pytest.raises(ResumeRefused, match="servers.json is damaged"):
        list_wanted(run_dir, ())


def test_unavailable_store_drops_no_server(tmp_path: Path) -> None:
    async def scene(one: Scene) -> None:
        a, b = one.servers
        await one.pool.adopt(one.publish(1))
        await one.until(READY, READY)
        a.is_store_away = True
        adopting = asyncio.ensure_future(one.pool.adopt(one.publish(2)))
        expected = f"{a.url} cannot fetch version 2 yet: the store is not available"
        await until(lambda: expected in one.words())
        await one.until(READY, READY)
        assert [status.version for status in one.pool.status.servers] == [1, 2]
        await adopting
        requests = a.asked[ADOPT]
        a.is_store_away = False
        await until(lambda: one.pool.servers[a.url].version == 2)
        assert a.asked[ADOPT] > requests and one.pool.servers[a.url].problem == ""
        assert a.asked["/sightline/v1/lease"] == 1 and one.words().count(expected) == 1

    play(tmp_path, scene, rejoin_after_s=0.05, deadline_s=0.1)


def test_servers_that_swap_addresses_are_listed_once(tmp_path: Path) -> None:
    async def scene(one: Scene) -> None:
        a, b = one.servers
        joined = tmp_path / "joined"

        async def place(name: str, server: SmallServer) -> None:
            await one.pool.place(name, GenerateClient(server.url, deadline_s=1.0), joined)

        await place("x", a)
        await place("y", b)
        await one.until(READY, READY)
        tasks = [server.task for server in one.pool.servers.values()]
        await place("x", b)
        await place("y", a)
        await one.until(READY, READY)
        assert all(task is not None and task.done() for task in tasks), "nobody else keeps them"
        assert {url: kept.name for url, kept in one.pool.servers.items()} == {
            a.url: "y", b.url: "x",
        }  # fmt: skip

    play(tmp_path, scene, first_version=0, is_empty=True)


def test_server_with_a_stuck_engine_is_skipped_until_it_recovers(tmp_path: Path) -> None:
    async def scene(one: Scene) -> None:
        a, b = one.servers
        await one.until(READY, READY)
        a.step_s = one.pool.times.stuck_after_s + 1
        await one.until("", READY)
        health = a.asked["/health"]
        await until(lambda: a.asked["/health"] > health + 3)
        assert one.states() == ["", READY], "it answers, and is not taken back"
        assert f"{a.url} has computed one step for 601 s" in " ".join(one.words())
        a.step_s = 0.0
        await one.until(READY, READY)

    times = ProbeTimes(ask_every_s=0.05, timeout_s=60.0, silent_after_s=0.2)
    play(tmp_path, scene, first_version=0, times=times)
