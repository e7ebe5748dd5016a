"""Whatever shape an agent keeps its history in, the server recognises it; only real edits fork.

Random agents talk through the real interception server, over HTTP, with the real SDK. With every
request they send all of their history, each answer of the model written anew: content of null,
arguments in another order, without its reasoning, in parts. Now and then they change something.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shards import take_first

from sightline.envs import Chat
from sightline.message import Message, ToolCall, assistant
from sightline.trace import Trace
from tests.agents import LOOK, CountingStore, Worker, agent, listening, picture_url
from tests.contract.case import Case
from tests.contract.cases import read_cases
from tests.logged_chat import LoggingPolicy
from tests.properties.test_rollouts import (
    FEW,
    World,
    check_log,
    check_shared,
    check_trained,
    in_full,
    world_of,
)

__all__ = ["world_of"]
ARGUMENTS = '{"x": 1.0, "names": ["the", true], "at": {"b": 2, "a": 1}}'
PICTURES = [picture_url(number) for number in range(4)]
# One case a chat format: others differ in their tokenizers and weights only.
CASES = [
    case
    for case in read_cases()
    if case.takes_tools and case.shows_media and not case.name.endswith(("_merges", "_moe"))
]
FEWER = settings(FEW, max_examples=7)


class Step(msgspec.Struct, frozen=True):
    pictures: tuple[int, ...]
    seed: int
    """Of how each answer is written this time."""
    edit: int | None
    """The place of a message that is changed first, modulo their number; None for none."""


STEPS = st.lists(
    st.builds(
        Step,
        pictures=st.lists(st.integers(0, len(PICTURES) - 1), max_size=2).map(tuple),
        seed=st.integers(0, 1 << 20),
        edit=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=7,
)
# So that the property is not true for want of cases.
ALL_OF_IT = [
    Step((number % 4, (number + 1) % 4), 10 + number, {3: 4, 5: 1}.get(number))
    for number in range(7)
]


@dataclass
class Kept:
    """A message as the agent keeps it."""

    message: dict[str, Any]
    """As it was sent last."""
    answer: dict[str, Any] | None = None
    """As the server said it, while everything before it is as it was."""


@dataclass
class Forgetful:
    """An agent that writes what it was told in another way each time it sends it."""

    history: list[Kept] = field(default_factory=list)
    num_edits: int = 0
    shown: set[int] = field(default_factory=set)

    async def play(self, chat: Chat, steps: list[Step]) -> float:
        async with agent(chat) as client:
            for number, step in enumerate(steps):
                rng = random.Random(step.seed)
                for kept in self.history:
                    if kept.answer is not None:
                        kept.message = rewritten(kept.answer, rng)
                if step.edit is not None and self.history:
                    self.edit(step.edit % len(self.history))
                self.look(step, number)
                asked: Any = [kept.message for kept in self.history]
                told = await client.chat.completions.create(model="m", messages=asked, tools=[LOOK])
                said = told.choices[0].message.model_dump(exclude_none=True)
                self.history.append(Kept(said, said))
        return 1.0

    def edit(self, place: int) -> None:
        self.num_edits += 1
        self.history[place].message = edited(self.history[place].message, self.num_edits)
        # What follows an edit was never sampled behind it: from here on it is only words.
        for kept in self.history[place:]:
            kept.answer = None

    def look(self, step: Step, number: int) -> None:
        """What the tools show that were called, or what the user says."""
        self.shown.update(step.pictures)
        parts: list[Any] = [{"type": "text", "text": f"look {number}"}]
        for picture in step.pictures:
            parts.append({"type": "image_url", "image_url": {"url": PICTURES[picture]}})
        calls = self.history[-1].message.get("tool_calls", ()) if self.history else ()
        for call in calls:
            tool = {"role": "tool", "tool_call_id": call["id"], "content": parts}
            self.history.append(Kept(tool))
        if not calls:
            self.history.append(Kept({"role": "user", "content": parts}))


def rewritten(answer: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same answer as another program would keep it."""
    kept = json.loads(json.dumps(answer))
    if rng.random() < 0.5:
        kept.pop("reasoning_content", None)
    calls = kept.get("tool_calls", ())
    for call in calls:
        if rng.random() < 0.7:
            call["function"]["arguments"] = rewritten_json(call["function"]["arguments"], rng)
    if calls and rng.random() < 0.5:
        kept["content"] = rng.choice([None, "", []])
    elif kept.get("content") and rng.random() < 0.5:
        kept["content"] = [{"type": "text", "text": letter} for letter in kept["content"]]
    return kept


def rewritten_json(spelling: str, rng: random.Random) -> str:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            items = list(value.items())
            rng.shuffle(items)
            return {name: turned(inner) for name, inner in items}
        if isinstance(value, list):
            return [turned(inner) for inner in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(turned(json.loads(spelling)), indent=rng.choice([None, 2]))


def edited(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Another message in its place, that nobody has sent before."""
    if message.get("tool_calls"):
        calls = json.loads(json.dumps(message["tool_calls"]))
        calls[0]["function"]["arguments"] = json.dumps({"x": 1000 + number})
        return {**message, "tool_calls": calls}
    return {**message, "content": f"edit {number}"}


def sayings_of(world: World) -> list[list[int]]:
    said = [called("", None), called("I look.", None), assistant("yes"), assistant("the a b")]
    if world.case.takes_reasoning and not world.case.fades_reasoning:
        # Calls alone: behind a word of the user, the template itself takes reasoning, or its empty
        # block, out of the history, which is a fork without an edit.
        hm, the = (None, None) if world.case.closes_reasoning else ("hm", "the")
        said = [called(content, hm) for content in ("", "I look.")] + [called("", the)]
    return [in_full(world.renderer, message) for message in said]


def called(content: str, reasoning: str | None) -> Message:
    calls = (ToolCall("look", ARGUMENTS, "functions.look:0"),)
    return msgspec.structs.replace(assistant(content, reasoning), tool_calls=calls)


@pytest.mark.parametrize("case", take_first(CASES, 2), ids=lambda case: case.name)
def test_a_history_written_anew_forks_where_it_was_edited_and_nowhere_else(
    case: Case, world_of: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = world_of(case)
    model, sayings = world.store.root.parent / "model", sayings_of(world)

    @FEWER
    @example(steps=ALL_OF_IT)
    @given(steps=STEPS)
    def play(steps: list[Step]) -> None:
        policy = LoggingPolicy(sayings, disorder=0.0)
        store = CountingStore(tmp_path_factory.mktemp("shown"))
        player = Forgetful()

        async def main() -> Trace:
            async with listening(policy.app()) as address:
                worker = Worker(model, store, address, max_tokens=200)
                return await worker.play(lambda chat: player.play(chat, steps))

        trace = asyncio.run(main())
        assert not trace.error and not trace.refused_requests, (trace.error, trace.refused_requests)
        assert len(trace.turns) == len(steps) == len(policy.log)
        check_log(trace, policy.log)
        check_shared(trace)
        check_trained(trace, policy.log)
        assert store.num_put == len(player.shown), "each image once, however often it came"
        assert sum(trace.forks.values()) == player.num_edits, trace.forks
        assert len(trace.branches()) == 1 + player.num_edits

    play()
