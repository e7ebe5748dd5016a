"""Many rollouts share one renderer and one event loop."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from PIL import Image
from scripted_policy import ScriptedPolicy

from sightline.envs import Environment, Outcome, Task
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import user
from sightline.render import Renderer
from sightline.rollout.chat_sources import PolicyChats
from sightline.rollout.client import GenerateClient
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

NUM_ROLLOUTS = 400


class Talks(Environment):
    """A few turns of text and pictures, by the number of the task."""

    name = "talks"

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)

    async def rollout(self, task: Task, chat: Any) -> Outcome:
        rng = random.Random(task.index)
        for turn in range(2):
            words = "".join(chr(rng.randrange(32, 1200)) for _ in range(rng.randrange(200)))
            images = [chat.put(picture(rng.randrange(5)))] if rng.random() < 0.5 else []
            await chat.send([user(f"{turn} {words}", *images)])
        return Outcome(1.0)


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (32 + 32 * number, 64), (number, 0, 0))


@asynccontextmanager
async def playing(
    env: Environment, renderer: Any, store: MediaStore
) -> AsyncIterator[RolloutPlayer]:
    """A player of `env` against a policy that returns random text."""
    runner = web.AppRunner(ScriptedPolicy().app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = GenerateClient(site.name)
    chats = PolicyChats(
        renderer=renderer, store=store, client=client, modality="image", max_tokens=6
    )
    yield RolloutPlayer(env, chats, timeout_s=100)
    await chats.close()
    await runner.cleanup()


async def play(one: RolloutPlayer, index: int) -> Trace:
    played = await one.play(RolloutRequest(f"r{index}", "g", index, "train", index, 1.0))
    return played.trace


def test_rollouts_sharing_a_renderer_match_separate_ones(
    tiny_model: Path, store: MediaStore
) -> None:
    async def main() -> None:
        async with playing(Talks(), load_renderer(tiny_model, store), store) as player:
            together = await asyncio.gather(*(play(player, index) for index in range(NUM_ROLLOUTS)))
            for index in range(0, NUM_ROLLOUTS, 8):
                alone, beside = await play(player, index), together[index]
                assert not alone.error and alone.num_images_shown == beside.num_images_shown
                assert [n.token_ids for n in alone.nodes] == [n.token_ids for n in beside.nodes]
                assert [n.slots for n in alone.nodes] == [n.slots for n in beside.nodes]
            assert not any(trace.error for trace in together)

    asyncio.run(main())


class Slow:
    """A renderer that needs the event loop. If it blocked the loop, it would hang."""

    def __init__(self, real: Renderer, loop: asyncio.AbstractEventLoop) -> None:
        self.real, self.loop = real, loop
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _turns(self, name: str) -> None:
        turned = threading.Event()
        self.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(10), f"the event loop stands still while {name} works"
        self.calls.append(name)

    def render(self, *args: Any, **more: Any) -> Any:
        self._turns("render")
        return self.real.render(*args, **more)

    def bridge(self, *args: Any, **more: Any) -> Any:
        self._turns("bridge")
        return self.real.bridge(*args, **more)

    def parse(self, *args: Any, **more: Any) -> Any:
        self._turns("parse")
        return self.real.parse(*args, **more)


def test_event_loop_runs_while_a_renderer_works(tiny_model: Path, store: MediaStore) -> None:
    async def main() -> None:
        slow = Slow(load_renderer(tiny_model, store), asyncio.get_running_loop())
        async with playing(Talks(), slow, store) as player:
            trace = await play(player, 0)
        assert not trace.error, trace.error
        assert slow.calls == ["render", "parse", "bridge", "parse"]

    asyncio.run(main())
