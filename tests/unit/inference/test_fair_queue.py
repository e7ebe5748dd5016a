"""Order of admission: the client, then the call, with the fewest sequences goes first."""

from __future__ import annotations

import random

import numpy as np

from sightline.inference.engine import EngineRequest
from sightline.inference.fair_queue import FairQueue
from sightline.wire.generate import SamplingParams


def call(name: str, n: int = 1, client: str = "") -> list[EngineRequest]:
    owner = [name]
    prompt = np.zeros(1, dtype=np.int32)
    return [
        EngineRequest(
            prompt, [], [], SamplingParams(), k, owner=owner, client=client, request_id=name
        )
        for k in range(n)
    ]


def add(queue: FairQueue, *requests: EngineRequest) -> None:
    for request in requests:
        queue.add(request)


def take(queue: FairQueue) -> EngineRequest:
    request = queue.find_next()
    assert request is not None
    queue.take(request)
    return request


def test_small_call_waits_for_one_slot_after_twenty_large_calls() -> None:
    queue = FairQueue()
    for i in range(20):
        add(queue, *call(f"large {i}", 64))
    calls = [take(queue) for _ in range(256)]
    # 256 places are shared evenly among 20 clients.
    counts = [sum(r.request_id == f"large {i}" for r in calls) for i in range(20)]
    assert sorted(counts) == [12] * 4 + [13] * 16
    add(queue, *call("small"))
    queue.release(calls.pop())
    assert take(queue).request_id == "small"


def test_busy_client_yields_the_next_slot_to_another_client() -> None:
    queue = FairQueue()
    add(queue, *(r for i in range(100) for r in call(f"run {i}", client="10.0.0.2")))
    calls = [take(queue) for _ in range(8)]
    assert [r.request_id for r in calls] == [f"run {i}" for i in range(8)]
    add(queue, *call("a person", 2, client="10.0.0.3"))
    for request in calls[:2]:
        queue.release(request)
    assert [take(queue).client for _ in range(2)] == ["10.0.0.3"] * 2


def test_single_choice_calls_are_served_in_arrival_order() -> None:
    queue = FairQueue()
    add(queue, *(r for i in range(50) for r in call(str(i))))
    assert [take(queue).request_id for _ in range(50)] == [str(i) for i in range(50)]
    assert queue.find_next() is None and len(queue) == 0


def test_finished_calls_leave_no_state() -> None:
    queue, rng, waiting, active = FairQueue(), random.Random(0), [], []
    for i in range(200):
        waiting += call(str(i), rng.randrange(1, 6), client=str(i % 3))
        add(queue, *[r for r in waiting if r.request_id == str(i)])
    while waiting or active:
        if active and rng.random() < 0.4:
            queue.release(active.pop(rng.randrange(len(active))))
        elif waiting and rng.random() < 0.3:  # a client hangs up
            gone = waiting.pop(rng.randrange(len(waiting)))
            assert queue.remove(gone) and not queue.remove(gone)
        elif waiting:
            active.append(take(queue))
            waiting.remove(active[-1])
        assert len(queue) == len(waiting) == len(list(queue))
    assert not queue._waiting and not queue._num_held
