from __future__ import annotations

import json
from typing import Any

import pytest

from sightline.envs.actions import ActionField, TextActions, ToolActions
from sightline.message import Message, ToolCall, assistant

FIELDS = (ActionField("x", num_values=160), ActionField("y", num_values=128))
CLICK = TextActions(FIELDS, "click")
TOOL = ToolActions(FIELDS, "click", "Clicks.")
MOVE = TextActions((ActionField("direction", ("U", "D")),))


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


def test_a_letter_is_the_whole_answer() -> None:
    assert MOVE.read(assistant("U")) == ("U",)
    assert [MOVE.read(assistant(said)) for said in ("UU", "u", "U.", "", "L")] == [None] * 5


@pytest.mark.parametrize(
    "said",
    [call({"x": 1}), call({"x": 1, "y": 2, "z": 3}), call({"x": "1", "y": 2}),
     call({"x": True, "y": 2}), call({"x": 1.5, "y": 2}), call({"x": 160, "y": 2}), call([1, 2]),
     call("not json"), call({"x": 1, "y": 2}, "tap"), assistant("click 1 2"),
     Message(role="assistant", tool_calls=call({"x": 1, "y": 2}).tool_calls * 2)],
)  # fmt: skip
def test_a_call_that_does_not_fit_the_schema_is_none(said: Message) -> None:
    assert TOOL.read(said) is None


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
