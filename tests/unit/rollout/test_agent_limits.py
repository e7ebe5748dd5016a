"""Requests that exceed a limit: only they fail, and the rollout's other requests are answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from agents import Plays, Worker, agent, listening
from scripted_policy import ScriptedPolicy

from sightline.envs import Chat, Task
from sightline.media import MediaStore
from sightline.trace import Trace

MAX_MODEL_LEN = 400


def asked(words: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": words}]}


FITS = asked("Hi")
LONG_PROMPT = asked("a b " * 150)
"""Fits as text, and does not fit as a prompt."""
LONG_TEXT = asked("a b " * 50_000)
"""Cannot fit, and is refused before it is tokenized."""
HUGE_BODY = asked("a" * 2_000_000)
OVERSIZED = {"prompt": LONG_PROMPT, "text": LONG_TEXT, "body": HUGE_BODY}


def play(
    model: Path, store: MediaStore, rollout: Any, policy: ScriptedPolicy | None = None, **more: Any
) -> Trace:
    async def main() -> Trace:
        async with listening((policy or ScriptedPolicy()).app()) as address:
            worker = Worker(model, store, address, max_model_len=MAX_MODEL_LEN, **more)
            with worker.player(rollout) as player:
                player.chats.interception.max_body_bytes = 1_000_000
                return await worker.play_with(player)

    return asyncio.run(main())


@pytest.mark.parametrize("name", OVERSIZED)
@pytest.mark.parametrize("path", ["send", "agent"])
def test_oversized_request_fails_alone(
    tiny_model: Path, store: MediaStore, name: str, path: str
) -> None:
    if (name, path) == ("body", "send"):
        return  # an environment's own call has no body

    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            first = await client.chat.completions.create(**FITS)
            if path == "agent":
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(**OVERSIZED[name])
                code = "request_too_large" if name == "body" else "context_length_exceeded"
                assert caught.value.code == code
            else:
                with pytest.raises(Exception, match="max_model_len"):
                    await chat.ask(OVERSIZED[name]["messages"])
            said = first.choices[0].message.model_dump(exclude_none=True)
            history = [*FITS["messages"], said, {"role": "user", "content": "On."}]
            await client.chat.completions.create(model="m", messages=history)
        return 1.0

    trace = play(tiny_model, store, rollout)
    assert not trace.error, trace.error
    assert (trace.reward, trace.truncated, trace.limit) == (1.0, False, "")
    assert len(trace.turns) == 2 and trace.forks == {}
    if path == "agent":
        assert len(trace.refused_requests) == 1


def test_limit_applies_to_the_max_tokens_of_the_request(
    tiny_model: Path, store: MediaStore
) -> None:
    prompt = asked("a b " * 30)

    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            await client.chat.completions.create(**prompt, max_tokens=4)
            with pytest.raises(openai.BadRequestError, match=r"the request's max_tokens = 350"):
                await client.chat.completions.create(**prompt, max_tokens=350)
            with pytest.raises(openai.BadRequestError, match=r"\[rollout\] max_tokens = 390"):
                await client.chat.completions.create(**prompt)
            await client.chat.completions.create(**prompt, max_tokens=1)
        return 1.0

    trace = play(tiny_model, store, rollout, max_tokens=390)
    assert not trace.error and len(trace.turns) == 2


@pytest.mark.parametrize("name", ["prompt", "text"])
def test_agent_that_gives_up_at_the_limit_ends_a_truncated_rollout(
    tiny_model: Path, store: MediaStore, name: str
) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            await client.chat.completions.create(**FITS)
            await client.chat.completions.create(**OVERSIZED[name])
        return 1.0

    class Worth(Plays):
        def truncated(self, task: Task) -> float:
            return 0.25

    trace = play(tiny_model, store, Worth(rollout))
    assert trace.truncated and not trace.error and trace.reward == 0.25
    assert str(MAX_MODEL_LEN) in trace.limit


def test_answer_to_an_earlier_request_does_not_hide_the_limit(
    tiny_model: Path, store: MediaStore
) -> None:
    class Slow(ScriptedPolicy):
        """Answers only when the test says so."""

        def __init__(self) -> None:
            super().__init__()
            self.arrived, self.may_answer = asyncio.Event(), asyncio.Event()

        async def _generate(self, http: Any) -> Any:
            self.arrived.set()
            await self.may_answer.wait()
            return await super()._generate(http)

    policy = Slow()

    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            sibling = asyncio.ensure_future(client.chat.completions.create(**FITS))
            await policy.arrived.wait()
            try:
                await client.chat.completions.create(**LONG_PROMPT)
            finally:
                policy.may_answer.set()
                await sibling
        return 1.0

    trace = play(tiny_model, store, rollout, policy)
    assert trace.truncated and not trace.error and len(trace.turns) == 1


def test_turn_limit_also_counts_every_choice(tiny_model: Path, store: MediaStore) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**FITS, n=3)
            assert caught.value.code == "max_turns_reached"
            answer = await client.chat.completions.create(**FITS, n=2)
            assert len(answer.choices) == 2
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**FITS)
        return 1.0

    trace = play(tiny_model, store, rollout, max_turns=2)
    assert trace.truncated and len(trace.turns) == 2 and "max_turns = 2" in trace.limit
