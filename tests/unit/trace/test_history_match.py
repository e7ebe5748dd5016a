"""A turn is recognized in another form. Everything else is another message."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sightline.message import Message, TextPart, ToolCall, assistant, text, user
from sightline.trace import Node, PolicySpan, Trace
from sightline.trace.history_match import make_call_id, match_history
from sightline.trace.node import float32_array, int32_array

SAID = Message(
    role="assistant",
    content=text("Hm."),
    reasoning="I think.",
    tool_calls=(ToolCall("look", '{"x": 1.0, "y": [true, null]}'), ToolCall("go", "{}")),
)


def trace_of(*said: Message, sampled: bool = True) -> Trace:
    """A question with several answers."""
    nodes = [Node(0, -1, user("q"), int32_array([1]), sampled_start=1)]
    for i, message in enumerate(said, start=1):
        turn = {
            "logprobs": float32_array([-1.0]),
            "versions": (PolicySpan(0, 1, version=0, epoch=0),),
            "finish_reason": "stop",
        }
        more = turn if sampled else {}
        nodes.append(Node(i, 0, message, int32_array([2, 3]), sampled_start=2 - sampled, **more))
    return Trace(id="t", nodes=nodes)


def found(trace: Trace, message: Message) -> tuple[int, list[Message]]:
    return match_history(trace, [user("q"), message, user("next")])


def with_call(arguments: str, name: str = "look", id: str = "") -> Message:
    return replace(SAID, tool_calls=(ToolCall(name, arguments, id), SAID.tool_calls[1]))


@pytest.mark.parametrize(
    "message",
    [
        SAID,
        replace(SAID, reasoning=None),
        replace(SAID, content=()),
        replace(SAID, content=(TextPart("H"), TextPart("m."))),
        replace(SAID, name="Bo"),
        with_call('{"y":[true,null],"x":1}'),
        with_call('{"x": 1e0, "y": [true, null]}', id="whatever"),
        replace(with_call('{ "x":1.0,"y":[true,null] }'), reasoning=None, content=()),
    ],
)
def test_reworded_turn_is_recognized(message: Message) -> None:
    node, history = found(trace_of(SAID), message)
    assert node == 1
    assert history == [user("q"), SAID, user("next")], "the trace's own words are rendered"


@pytest.mark.parametrize(
    "message",
    [
        replace(SAID, reasoning="I thought."),
        replace(SAID, content=text("Hm. ")),
        replace(SAID, tool_calls=()),
        replace(SAID, tool_calls=SAID.tool_calls[::-1]),
        with_call('{"x": 2, "y": [true, null]}'),
        with_call('{"x": 1.0, "y": [1, null]}'),
        with_call('{"x": 1.0, "y": [true]}'),
        with_call('{"x": 1.0}'),
        with_call('{"x": 1.0, "y": [true, null], "z": null}'),
        with_call("not JSON"),
        with_call("[" * 100_000),
        with_call('{"x": 1.0, "y": [true, null]}', name="peek"),
        replace(SAID, role="user"),
    ],
)
def test_different_message_is_not_recognized(message: Message) -> None:
    node, history = found(trace_of(SAID), message)
    assert node == 0 and history == [user("q"), message, user("next")]


def test_missing_content_without_tool_calls_is_an_edit() -> None:
    assert found(trace_of(assistant("yes")), Message(role="assistant"))[0] == 0


def test_only_sampled_turns_match_when_reworded() -> None:
    given_by_user = trace_of(SAID, sampled=False)
    assert found(given_by_user, SAID)[0] == 1
    assert found(given_by_user, replace(SAID, reasoning=None))[0] == 0


def test_match_prefers_the_named_then_the_identical_then_the_newest_answer() -> None:
    other = replace(SAID, reasoning="Otherwise.")
    trace = trace_of(SAID, other, SAID)
    blunt = replace(SAID, reasoning=None)
    assert found(trace, blunt)[0] == 3
    assert found(trace, other)[0] == 2
    for node in (1, 2, 3):
        calls = tuple(
            replace(call, id=make_call_id(node, k)) for k, call in enumerate(SAID.tool_calls)
        )
        assert found(trace, replace(blunt, tool_calls=calls))[0] == node
