"""An environment's failure costs only its own rollout, and is reported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sightline.config.secret_refs import resolve_secret
from sightline.envs import Environment, Outcome, Task
from sightline.envs.protocol import EnvironmentMix
from sightline.errors import EnvironmentFailed
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.rollout.chat_sources import PolicyChats
from sightline.rollout.client import GenerateClient
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace, decode_trace, encode_trace
from sightline.wire.control import RolloutRequest


class Returns(Environment):
    """Returns or raises a given value, without calling a model."""

    name = "returns"

    def __init__(self, result: Any) -> None:
        self.result = result

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)

    async def rollout(self, task: Task, chat: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        if self.result == "sleep":
            await asyncio.sleep(60)
        return self.result


@pytest.fixture
def play(tiny_model: Path, store: MediaStore):
    renderer = load_renderer(tiny_model, store)

    def run(result: Any, task: int = 0) -> Trace:
        env = result if isinstance(result, Environment) else Returns(result)
        client = GenerateClient("http://127.0.0.1:9")
        chats = PolicyChats(
            renderer=renderer, store=store, client=client, modality="image", max_tokens=4
        )
        player = RolloutPlayer(env, chats, timeout_s=0.2)

        async def main() -> Trace:
            played = await player.play(RolloutRequest("r", "g", task, "train", 1, 1.0))
            await player.close()
            return decode_trace(encode_trace(played.trace))

        return asyncio.run(main())

    return run


@pytest.mark.parametrize(
    "result",
    [
        float("nan"),
        Outcome(1.0, {"a": float("inf")}),
        Outcome(1.0, per_turn=[float("nan")]),
        Outcome(1.0, per_turn=[1.0]),
        "a string",
        None,
    ],
)
def test_invalid_reward_breaks_the_rollout(play, result: Any) -> None:
    trace = play(result)
    assert trace.reward is None and trace.error_kind == "EnvironmentFailed" and trace.error


class ReturnsIndex(Returns):
    name = "indexed"

    async def rollout(self, task: Task, chat: Any) -> float:
        return self.result + float(task.index)


def test_member_of_a_mix_plays_the_task_that_is_its_own(play) -> None:
    mix = EnvironmentMix([(ReturnsIndex(100.0), 1.0), (Returns(0.0), 1.0)])
    trace = play(mix, task=14)
    assert (trace.task, trace.env, trace.reward) == (14, "indexed", 107.0)


def test_an_exception_is_recorded_with_its_traceback(play) -> None:
    trace = play(RuntimeError("the game crashed"))
    assert "the game crashed" in trace.error and "Traceback" in trace.error


def test_environments_own_timeout_is_not_a_rollout_timeout(play) -> None:
    own = play(TimeoutError("the browser took too long"))
    assert own.error_kind == "EnvironmentFailed" and "browser" in own.error
    assert play("sleep").error_kind == "timeout"


def test_a_secret_in_an_exception_is_masked(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-7d1f0a-never-to-be-seen")
    key = resolve_secret("env:MY_KEY", "api_key")
    for error in (ValueError(f"401 for key {key}"), EnvironmentFailed(key, f"not {key}")):
        failure = play(error).error
        assert key not in failure and "***" in failure
