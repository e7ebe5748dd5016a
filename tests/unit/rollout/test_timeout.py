"""User code that hangs, cleans up too slowly, or exits the process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.rollout.test_chats import Plays, Trial
from unit.rollout.test_many import playing

from sightline.envs import BlockingChat, Task
from sightline.envs.tools import Toolbox
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import AssistantMessage, ToolCall, user
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

MANY = 40
"""More than the number of threads in an event loop's own pool."""


@pytest.fixture
def play(tiny_model: Path, store: MediaStore) -> Trial:
    return Trial(tiny_model, store)


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


# --- tools that hang


@pytest.mark.parametrize("way", ["tool", "to_thread"])
def test_hanging_tools_do_not_block_other_rollouts_and_are_counted(
    tiny_model: Path, store: MediaStore, way: str
) -> None:
    hanging, goes_on = threading.Semaphore(0), threading.Event()

    def look(hangs: bool) -> str:
        """Looks."""
        if hangs:
            hanging.release()
            goes_on.wait(60)
        return "seen"

    async def rollout(task: Task, chat: Any) -> float:
        await chat.send([user("look")])
        if way == "to_thread":
            await asyncio.to_thread(look, task.split == "hangs")
            return 1.0
        words = '{"hangs": true}' if task.split == "hangs" else '{"hangs": false}'
        answer = AssistantMessage("assistant", tool_calls=(ToolCall("look", words),))
        await chat.send(await Toolbox(look).run(answer, chat.put))
        return 1.0

    async def main() -> None:
        async with playing(Plays(rollout), load_renderer(tiny_model, store), store) as player:
            player.timeout_s = 600.0

            async def one(index: int, split: str) -> Trace:
                played = await player.play(
                    RolloutRequest(f"{split}{index}", "g", index, split, 1, 1.0)
                )
                return played.trace

            hung = [asyncio.create_task(one(index, "hangs")) for index in range(MANY)]
            for _ in range(MANY):
                await until(lambda: hanging.acquire(blocking=False))
            others = await asyncio.wait_for(
                asyncio.gather(*(one(index, "train") for index in range(4))), 60
            )
            assert [(trace.error, trace.reward) for trace in others] == [("", 1.0)] * 4
            assert player.threads.stuck_s() == 0, "their rollouts are not over"
            for task in hung:
                task.cancel()
            await asyncio.wait(hung)
            assert player.threads.stuck_s() > 0
            goes_on.set()
            await until(lambda: player.threads.stuck_s() == 0)

    asyncio.run(main())


# --- time limits


def test_hanging_cleanup_breaks_the_rollout_and_is_counted(
    tiny_model: Path, store: MediaStore
) -> None:
    async def main() -> None:
        goes_on, errors = asyncio.Event(), list[BaseException]()

        async def rollout(task: Task, chat: Any) -> None:
            try:
                await asyncio.sleep(600)
            finally:
                await goes_on.wait()
                try:
                    await chat.send([user("still here")])
                except BaseException as error:
                    errors.append(error)
                    raise

        async with playing(Plays(rollout), load_renderer(tiny_model, store), store) as player:
            player.timeout_s = player.threads.grace_s = 0.05
            played = await asyncio.wait_for(
                player.play(RolloutRequest("r", "g", 0, "train", 7, 1.0)), 60
            )
            trace = played.trace
            assert trace.error_kind == "timeout" and trace.error == "took more than 0.05 s"
            assert player.threads.stuck_s() > 0
            goes_on.set()
            await until(lambda: player.threads.stuck_s() == 0)
            assert isinstance(errors[0], asyncio.CancelledError), "its rollout is over"
            assert not any(server.client.num_requests for server in player.chats.router._all)

    asyncio.run(main())


def test_timeout_cancels_the_pending_wait_of_a_sync_rollout(play: Trial) -> None:
    """The timeout also cancels a pending wait, such as one for the server's answer."""
    cancelled, ended = threading.Event(), threading.Event()

    async def answer() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    def rollout(task: Task, chat: BlockingChat) -> float:
        try:
            chat.wait(answer())
        except Exception:
            raise AssertionError("user code must not go on") from None
        finally:
            ended.set()
        return 1.0

    assert play(rollout, timeout_s=0.2).error_kind == "timeout"
    assert cancelled.wait(60) and ended.wait(60)


# --- BaseException


def test_sys_exit_breaks_the_rollout_but_not_the_worker(play: Trial) -> None:
    async def exits(task: Task, chat: Any) -> float:
        sys.exit(0)

    async def exits_in_a_thread(task: Task, chat: Any) -> float:
        await asyncio.to_thread(sys.exit, 0)
        return 1.0

    def exits_while_it_waits(task: Task, chat: BlockingChat) -> float:
        return chat.wait(exits(task, chat))

    async def is_interrupted(task: Task, chat: Any) -> float:
        raise KeyboardInterrupt

    for rollout in (exits, exits_in_a_thread, exits_while_it_waits, is_interrupted):
        trace = play(rollout)
        assert trace.error_kind == "EnvironmentFailed" and trace.reward is None
        assert "SystemExit: 0" in trace.error or "KeyboardInterrupt" in trace.error


def test_self_cancelled_rollout_is_broken_and_not_lost(play: Trial) -> None:
    async def rollout(task: Task, chat: Any) -> None:
        part = asyncio.ensure_future(asyncio.sleep(600))
        part.cancel()
        await part

    trace = play(rollout)
    assert trace.error_kind == "EnvironmentFailed" and "own code cancelled" in trace.error
