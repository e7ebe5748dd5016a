"""The heartbeat of a worker goes on whatever its event loop does."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from sightline.rollout.beat import Beat, Heart, read_beat

SETUPS = 256


def next_beat(path: Path, after: int) -> Beat:
    """Waits, and holds up whatever thread it is called in, until there is a newer beat."""
    pause = threading.Event()
    for _ in range(6000):
        beat = read_beat(path)
        if beat is not None and beat.number > after:
            return beat
        pause.wait(0.01)
    raise AssertionError("no heartbeat for a minute")


def test_256_slow_setups_at_once_miss_no_heartbeat(tmp_path: Path) -> None:
    """Each set-up holds up the loop until the heart has beaten: without a thread it never would."""
    path = tmp_path / "worker-0.beat"
    heart = Heart(path, lambda: SETUPS, lambda: 0.0, every_s=0.005)
    seen: list[Beat] = []

    async def set_up() -> None:
        seen.append(next_beat(path, after=seen[-1].number if seen else 0))

    async def main() -> None:
        heart.start()
        await asyncio.gather(*(set_up() for _ in range(SETUPS)))
        heart.stop()

    asyncio.run(main())
    assert len(seen) == SETUPS
    assert all(
        later.number > earlier.number for earlier, later in zip(seen, seen[1:], strict=False)
    )
    assert len({beat.loop_s for beat in seen}) <= 2, "the loop had no turn after its first"
    assert seen[-1].time_s - seen[-1].loop_s > seen[0].time_s - seen[0].loop_s


def test_a_loop_that_turns_is_seen_to_turn(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.beat"
    assert read_beat(path) is None

    async def main() -> tuple[Beat, Beat]:
        heart = Heart(path, lambda: 3, lambda: 1.5, every_s=0.005)
        heart.start()
        first = await asyncio.to_thread(next_beat, path, 0)
        last = first
        while last.loop_s == first.loop_s:
            last = await asyncio.to_thread(next_beat, path, last.number)
        heart.stop()
        return first, last

    first, last = asyncio.run(main())
    assert last.loop_s > first.loop_s and (last.running, last.stuck_s) == (3, 1.5)
