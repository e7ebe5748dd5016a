"""A worker's heartbeat does not depend on its event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from sightline.envs import Environment, Task
from sightline.families import load_renderer
from sightline.launch.supervision import SILENCE_TIMEOUT_S
from sightline.media import MediaStore
from sightline.rollout.chat_sources import PolicyChats
from sightline.rollout.client import GenerateClient
from sightline.rollout.heartbeat import Heartbeat, HeartbeatRecord, find_heartbeat
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

SETUPS = 256


def next_beat(path: Path, after: float) -> HeartbeatRecord:
    """Block the calling thread until there is a newer heartbeat."""
    pause = threading.Event()
    for _ in range(6000):
        beat = find_heartbeat(path)
        if beat is not None and beat.time_s > after:
            return beat
        pause.wait(0.01)
    raise AssertionError("no heartbeat for a minute")


class SlowSetups(Environment):
    """Each set-up blocks the loop until the next heartbeat, which must come from another thread."""

    name = "slow"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[HeartbeatRecord] = []

    def task(self, index: int, split: str) -> Task:
        self.seen.append(next_beat(self.path, after=self.seen[-1].time_s if self.seen else 0))
        return Task(index, split)

    async def rollout(self, task: Task, chat: Any) -> float:
        return 1.0


def test_256_concurrent_slow_setups_miss_no_heartbeat(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    path = tmp_path / "worker-0.beat"
    env = SlowSetups(path)
    client = GenerateClient("http://127.0.0.1:9")
    chats = PolicyChats(
        renderer=load_renderer(tiny_model, store), store=store, client=client, modality="image",
        max_tokens=4,
    )  # fmt: skip
    player = RolloutPlayer(env, chats, timeout_s=600)

    async def main() -> list[Trace]:
        plays = [RolloutRequest(f"r{i}", "g", i, "train", i, 1.0) for i in range(SETUPS)]
        running = [asyncio.create_task(player.play(played_rollout)) for played_rollout in plays]
        heartbeat = Heartbeat(path, player.threads.stuck_s, every_s=0.005)
        heartbeat.start()
        played = await asyncio.gather(*running)
        heartbeat.stop()
        await player.close()
        return [played_rollout.trace for played_rollout in played]

    assert [trace.error for trace in asyncio.run(main())] == [""] * SETUPS
    setups, last = env.seen, find_heartbeat(path)
    assert len(setups) == SETUPS and last is not None and last.told_to_quit
    assert {beat.stuck_s for beat in setups} == {0.0}
    assert len({beat.loop_s for beat in setups}) <= 2, "the loop had no turn after its first"
    assert setups[-1].time_s - setups[-1].loop_s > setups[0].time_s - setups[0].loop_s
    for earlier, later in zip(setups, [*setups[1:], last], strict=True):
        assert 0 < later.time_s - earlier.time_s < SILENCE_TIMEOUT_S, "the launcher missed it"


def test_heartbeat_records_event_loop_progress(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.beat"
    assert find_heartbeat(path) is None

    async def main() -> tuple[HeartbeatRecord, HeartbeatRecord]:
        heartbeat = Heartbeat(path, lambda: 1.5, every_s=0.005)
        heartbeat.start()
        first = await asyncio.to_thread(next_beat, path, 0)
        last = first
        while last.loop_s == first.loop_s:
            last = await asyncio.to_thread(next_beat, path, last.time_s)
        heartbeat.stop()
        return first, last

    first, last = asyncio.run(main())
    assert last.loop_s > first.loop_s and last.stuck_s == 1.5
