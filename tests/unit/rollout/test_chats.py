"""Chats of both kinds: images, plain functions in threads, limits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from unit.rollout.test_many import playing

from sightline.envs import BlockingChat, Environment, Outcome, Task
from sightline.errors import MediaRefused, RolloutTruncated
from sightline.families import load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import user
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace
from sightline.view.transcript import format_transcript
from sightline.wire.control import RolloutRequest


class Plays(Environment):
    """A rollout that is given."""

    name = "plays"

    def __init__(self, rollout: Any) -> None:
        self.rollout = rollout

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)


def picture(level: int = 0) -> Image.Image:
    return Image.new("RGB", (64, 64), (level, 0, 0))


class Trial:
    """Play one rollout against a policy that returns random text."""

    def __init__(self, model: Path, store: MediaStore) -> None:
        self.store, self.renderer = store, load_renderer(model, store)

    def __call__(self, rollout: Any, env: Environment | None = None, **limits: Any) -> Trace:
        async def main() -> Trace:
            async with playing(env or Plays(rollout), self.renderer, self.store) as player:
                for name, value in limits.items():
                    parts = (player, player.threads, player.chats)
                    setattr(next(part for part in parts if hasattr(part, name)), name, value)
                self.player: RolloutPlayer = player
                played = await player.play(RolloutRequest("r", "g", 0, "train", 7, 1.0))
                return played.trace

        return asyncio.run(main())


@pytest.fixture
def play(tiny_model: Path, store: MediaStore) -> Trial:
    return Trial(tiny_model, store)


# --- images


def test_put_returns_a_ref_that_messages_accept(play: Trial) -> None:
    refs: list[MediaRef] = []

    async def rollout(task: Task, chat: Any) -> float:
        ref = chat.put(picture())
        assert isinstance(ref, MediaRef)
        await chat.send([user("one", ref)])
        part = {"type": "image_url", "image_url": {"url": ref.url}}
        await chat.send([{"role": "user", "content": [part, {"type": "image", "image": ref}]}])
        refs.append(ref)
        return 1.0

    trace = play(rollout)
    assert not trace.error and trace.num_images_shown == 3
    assert {slot.item.ref for node in trace.nodes for slot in node.slots} == set(refs)
    assert (refs[0].width, refs[0].mime) == (64, "image/png") and play.store.has(refs[0].digest)


class LoopBoundStore(MediaStore):
    """A store whose writes need the event loop. A blocked loop would time out."""

    loop: asyncio.AbstractEventLoop
    num_writes = 0

    def put_bytes(self, data: bytes, digest: str = "") -> str:
        loop_ran = threading.Event()
        self.loop.call_soon_threadsafe(loop_ran.set)
        assert loop_ran.wait(30), "the write blocked the event loop"
        self.num_writes += 1
        return super().put_bytes(data, digest)


def test_the_event_loop_runs_while_images_are_written(tiny_model: Path, tmp_path: Path) -> None:
    store = LoopBoundStore(tmp_path / "media")

    async def rollout(task: Task, chat: Any) -> float:
        store.loop = asyncio.get_running_loop()
        for turn in range(3):
            await chat.send([user(chat.put(picture(turn)))])
        await chat.send([user(picture(3))])  # the image itself is encoded in a thread, too
        return 1.0

    trace = Trial(tiny_model, store)(rollout)
    assert not trace.error and store.num_writes == 4


def test_image_is_readable_immediately_after_put(play: Trial) -> None:
    def rollout(task: Task, chat: BlockingChat) -> float:
        ref = chat.put(picture())
        return float(len(chat.get(ref)) == ref.nbytes)

    assert play(rollout).reward == 1.0


@pytest.mark.parametrize("sends", [True, False])
def test_bad_image_breaks_the_rollout_even_if_unsent(play: Trial, sends: bool) -> None:
    async def rollout(task: Task, chat: Any) -> float:
        ref = chat.put(b"\x89PNG\r\n\x1a\n and then nothing")
        if sends:
            await chat.send([user(ref)])
        return 1.0

    trace = play(rollout)
    assert trace.error_kind == MediaRefused.__name__ and trace.reward is None and not trace.nodes


# --- plain functions


def test_sync_rollout_function_behaves_like_an_async_one(play: Trial) -> None:
    async def waits(task: Task, chat: Any) -> dict[str, float]:
        answer = await chat.send([user("one", chat.put(picture(1)))])
        await chat.ask([user("two", chat.put(picture(chat.rng.randrange(9))))])
        return {"a": float(len(answer.text)), "b": 1.0}

    def plain(task: Task, chat: BlockingChat) -> dict[str, float]:
        answer = chat.send([user("one", chat.put(picture(1)))])
        chat.ask([user("two", chat.put(picture(chat.rng.randrange(9))))])
        return {"a": float(len(answer.text)), "b": 1.0}

    one, other = play(waits), play(plain)
    assert not one.error and not other.error, other.error
    assert one.reward == other.reward and one.rewards == other.rewards
    assert [n.token_ids for n in one.nodes] == [n.token_ids for n in other.nodes]
    assert [n.slots for n in one.nodes] == [n.slots for n in other.nodes]


def test_thread_outliving_its_rollout_is_stopped_at_its_next_call(play: Trial) -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def rollout(task: Task, chat: BlockingChat) -> float:
        try:
            goes_on.wait(60)
            while True:
                try:
                    chat.send([user("still here")])
                except Exception:
                    continue
        finally:
            ended.set()

    trace = play(rollout, timeout_s=0.2)
    assert trace.error_kind == "timeout"
    assert play.player.threads.stuck_s() > 0
    goes_on.set()
    assert ended.wait(60), "user code that swallows exceptions must not run for ever"


# --- limits


def length_of(play: Trial, text: str) -> int:
    return len(play.renderer.render([user(text)]).token_ids)


def test_too_long_prompt_ends_the_rollout_before_the_request(play: Trial) -> None:
    async def rollout(task: Task, chat: Any) -> float:
        await chat.send([user("short")])
        await chat.send([user("long " * 50)])
        raise AssertionError("not reached")

    room = length_of(play, "short") + 6
    trace = play(rollout, max_model_len=room)
    assert trace.error_kind == "truncated" and trace.truncated and not trace.error
    transcript = " ".join(" ".join(format_transcript(trace)).split())
    assert ", truncated" in transcript and "[inference] max_model_len" in transcript
    assert trace.reward == 0.0 and len(trace.turns) == 1
    assert [node.message.text for node in trace.nodes][0] == "short"
    assert len(trace.nodes) == 2, "the observation that did not fit is not in the trace"
    assert sum(server.client.num_requests for server in play.player.chats.router._all) == 1
    assert play(rollout, max_model_len=0).error_kind != "truncated"
    short = play(rollout, max_model_len=room - 1)
    assert short.error_kind == "truncated" and not short.nodes


def test_environment_may_score_a_truncated_rollout(play: Trial) -> None:
    async def rollout(task: Task, chat: Any) -> Outcome:
        done = 0
        try:
            while True:
                await chat.send([user("more")])
                done += 1
        except RolloutTruncated:
            return Outcome(done / 10, {"done": done}, per_turn=[0.1] * done)

    trace = play(rollout, max_turns=3)
    assert trace.error_kind == "truncated" and trace.reward == 0.3 and len(trace.turns) == 3
    assert trace.truncated and "[rollout] max_turns = 3" in trace.limit

    class Worth(Plays):
        def truncated(self, task: Task) -> float:
            return 0.5

    async def careless(task: Task, chat: Any) -> float:
        while True:
            await chat.send([user("more")])

    assert play(None, env=Worth(careless), max_turns=2).reward == 0.5
