from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sightline.envs.actions import (
    ActionField,
    EpisodeRules,
    NamedActions,
    TextActions,
    ToolActions,
)
from sightline.errors import RolloutTruncated
from sightline.message import Message, ToolCall, assistant, user

FIELDS = (ActionField("x", num_values=160), ActionField("y", num_values=128))
CLICK = TextActions(FIELDS, "click")
TOOL = ToolActions(FIELDS, "click", "Clicks.")


def call(arguments: Any, name: str = "click") -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Message(role="assistant", tool_calls=(ToolCall(name, text),))


@pytest.mark.parametrize("action_format", [CLICK, TOOL])
def test_what_a_format_writes_it_reads(action_format: Any) -> None:
    assert action_format.read(action_format.write((159, 0))) == (159, 0)


@pytest.mark.parametrize(
    "said",
    ["", "click", "click 1", "click 1 2 3", "click 160 0", "click 0 128", "click -1 2", "Click 1 2",
     "click 1 2 ", " click 1 2", "click 1.0 2", "click x y", "click ١ ٢", "click 1\n2"],
)  # fmt: skip
def test_text_that_is_not_exactly_an_action_is_none(said: str) -> None:
    assert CLICK.read(assistant(said)) is None


@pytest.mark.parametrize(
    "said",
    [call({"x": 1}), call({"x": 1, "y": 2, "z": 3}), call({"x": "1", "y": 2}),
     call({"x": True, "y": 2}), call({"x": 1.5, "y": 2}), call({"x": 160, "y": 2}), call([1, 2]),
     call("not json"), call({"x": 1, "y": 2}, "tap"), assistant("click 1 2"),
     Message(role="assistant", tool_calls=call({"x": 1, "y": 2}).tool_calls * 2)],
)  # fmt: skip
def test_a_call_that_does_not_fit_the_schema_is_none(said: Message) -> None:
    assert TOOL.read(said) is None


class Corridor:
    """An episode that pays 2 for every step and does not end by itself."""

    is_over = False

    async def observe(self, chat: Any, is_first: bool) -> Message:
        return user("go on")

    async def step(self, action: Any) -> float:
        return 2.0

    async def draw_action(self, rng: Any) -> Any:
        raise AssertionError("every answer is an action")


class ShortChat:
    """A chat with room for three answers."""

    num_calls = 0

    async def send(self, new_messages: Any) -> Message:
        if self.num_calls == 3:
            raise RolloutTruncated("no room", "show less")
        self.num_calls += 1
        return assistant("on")


def test_an_episode_that_is_cut_short_keeps_what_it_earned() -> None:
    rules = EpisodeRules(NamedActions({"on": 1}), "skip", 0.1, max_turns=9)
    chat: Any = ShortChat()
    outcome = asyncio.run(rules.play(Corridor(), chat))
    assert outcome.reward == outcome.parts["return"] == 6.0 and outcome.parts["turns"] == 3
    assert outcome.per_turn == [2.0, 2.0, 2.0], "one for each call that was answered"


def test_the_schema_says_what_is_read() -> None:
    (tool,) = TOOL.tools
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "minimum": 0, "maximum": 159},
            "y": {"type": "integer", "minimum": 0, "maximum": 127},
        },
        "required": ["x", "y"],
    }
