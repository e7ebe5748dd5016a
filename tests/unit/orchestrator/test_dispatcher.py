"""Assignment of rollouts to workers: their limit, and lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sightline.errors import ProcessFailed
from sightline.orchestrator.rollout_scheduler import RolloutDispatcher, RolloutScheduler
from sightline.rollout.evaluation import build_eval_request
from sightline.trace import Trace, encode_trace
from sightline.wire.control import ControlMessage, RolloutRequest, RolloutResult


def make_request(number: int) -> RolloutRequest:
    return RolloutRequest(f"r{number}", "g", number, "train", number, 1.0)


class Sent:
    """Records the messages sent to each worker. Sending to a lost worker fails."""

    def __init__(self) -> None:
        self.to: dict[str, list[str]] = {"a": [], "b": []}
        self.gone: set[str] = set()

    async def send(self, worker: str, message: ControlMessage) -> None:
        if worker in self.gone:
            raise ProcessFailed(f"no {worker}", "")
        if isinstance(message, RolloutRequest):
            self.to[worker].append(message.rollout_id)

    @property
    def num(self) -> int:
        return sum(map(len, self.to.values()))


def run(check: Callable[[Sent], Awaitable[None]]) -> None:
    asyncio.run(check(Sent()))


async def settle(dispatcher: RolloutDispatcher) -> None:
    sending = asyncio.ensure_future(dispatcher.keep_sending())
    for _ in range(20):
        await asyncio.sleep(0)
    sending.cancel()


def test_rollouts_in_flight_are_bounded() -> None:
    async def check(sent: Sent) -> None:
        dispatcher = RolloutDispatcher(sent.send, ["a", "b"], max_in_flight=3)
        for number in range(8):
            await dispatcher.submit(make_request(number))
        assert sent.num == dispatcher.num_in_flight == 3 and dispatcher.num_waiting == 5
        for number in range(8):
            assert dispatcher.take_result(f"r{number}")
            await settle(dispatcher)
            assert dispatcher.num_in_flight <= 3
        assert sent.num == 8 and not dispatcher.num_waiting and not dispatcher.num_in_flight

    run(check)


def test_least_busy_worker_is_next() -> None:
    async def check(sent: Sent) -> None:
        dispatcher = RolloutDispatcher(sent.send, ["a", "b"])
        for number in range(4):
            await dispatcher.submit(make_request(number))
        assert sent.to == {"a": ["r0", "r2"], "b": ["r1", "r3"]}
        dispatcher.take_result("r0")
        dispatcher.take_result("r2")
        await dispatcher.submit(make_request(4))
        await dispatcher.submit(make_request(5))
        assert sent.to["a"] == ["r0", "r2", "r4", "r5"]

    run(check)


def test_rollouts_of_a_lost_worker_wait_for_its_successor() -> None:
    async def check(sent: Sent) -> None:
        dispatcher = RolloutDispatcher(sent.send, ["a"])
        await dispatcher.submit(make_request(0))
        sent.gone.add("a")
        await dispatcher.submit(make_request(1))
        assert dispatcher.num_in_flight == 1 and dispatcher.num_waiting == 1
        sent.gone.clear()
        assert [request.rollout_id for request in dispatcher.on_worker_lost("a")] == ["r0"]
        await settle(dispatcher)
        assert sent.to["a"] == ["r0", "r1"] and not dispatcher.num_waiting
        assert not dispatcher.take_result("r0"), "it comes too late"

    run(check)


def test_lost_worker_breaks_its_rollouts_but_not_the_group() -> None:
    async def check(sent: Sent) -> None:
        rollouts = RolloutScheduler(
            RolloutDispatcher(sent.send, ["a", "b"]), group_size=4, temperature=1.0, seed=0
        )
        await rollouts.start_groups(1)
        alone = asyncio.ensure_future(rollouts.play_once(build_eval_request(0, "eval", 0, 1.0)))
        await asyncio.sleep(0)
        for name in sent.to["b"]:
            trace = Trace(id=name, group_id="g0", reward=1.0)
            rollouts.on_result(RolloutResult(name, encode_trace(trace)))
        rollouts.on_worker_lost("a", "crash: worker-0 ended with 7")
        group = await rollouts.wait_for_group()
        kinds = {trace.id: trace.error_kind for trace in group.traces}
        assert kinds == {
            "g0.0": "worker_lost", "g0.1": "", "g0.2": "worker_lost", "g0.3": "",
        }  # fmt: skip
        assert "ended with 7" in group.traces[0].error
        assert (await alone).error_kind == "worker_lost"
        assert rollouts.workers_lost == {"crash": 1}
        late = Trace(id="g0.0", group_id="g0", reward=1.0)
        rollouts.on_result(RolloutResult("g0.0", encode_trace(late)))
        assert len(group.traces) == 4 and rollouts.num_ahead == 0

    run(check)


def test_a_task_can_be_in_two_evaluations_at_once() -> None:
    """A background evaluation plays the same tasks as the one that confirms the goal."""

    async def check(sent: Sent) -> None:
        rollouts = RolloutScheduler(
            RolloutDispatcher(sent.send, ["a", "b"]), group_size=4, temperature=1.0, seed=0
        )
        requests = [build_eval_request(0, "eval", 0, 1.0, server=url) for url in ("", "http://x")]
        assert requests[0].seed == requests[1].seed
        playing = [asyncio.ensure_future(rollouts.play_once(request)) for request in requests]
        await asyncio.sleep(0)
        for name in sorted([*sent.to["a"], *sent.to["b"]]):
            rollouts.on_result(RolloutResult(name, encode_trace(Trace(id=name, reward=1.0))))
        traces = await asyncio.wait_for(asyncio.gather(*playing), 5)
        assert [trace.id for trace in traces] == [request.rollout_id for request in requests]

    run(check)
