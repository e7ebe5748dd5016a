"""The work of many rollouts, one at a time in each pass of the event loop."""

from __future__ import annotations

import asyncio

from sightline.rollout.client import LoopPacer


def test_each_loop_pass_releases_one_waiter_in_arrival_order() -> None:
    async def play() -> list[tuple[int, int]]:
        pacer, went, passes = LoopPacer(), [], 0

        async def count_passes() -> None:
            nonlocal passes
            while True:
                passes += 1
                await asyncio.sleep(0)

        async def wait(name: int) -> None:
            await pacer.wait_for_pass()
            went.append((name, passes))

        counting = asyncio.create_task(count_passes())
        await asyncio.gather(*(wait(name) for name in range(50)))
        counting.cancel()
        return went

    went = asyncio.run(play())
    assert [name for name, _ in went] == list(range(50))
    passes = [number for _, number in went]
    assert len(set(passes)) == 50, "two went in one pass"
