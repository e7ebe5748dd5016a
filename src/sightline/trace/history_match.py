"""Knows a turn of the trace again when a program sends it back in other words.

Programs keep histories in shapes of their own: they drop the reasoning, read the arguments of a
call and write them anew, send null for a content beside calls or a content in parts, name calls by
the ids that they were given, give the assistant a name. Each of these is still what the model
sampled, so that the history goes on from the sampled tokens. Anything else is an edit, and forks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from sightline.message import Message, ToolCall
from sightline.trace.graph import TraceGraph
from sightline.trace.node import ROOT, Node

_OTHER, _ALIKE, _SAME = range(3)


class MatchedHistory(NamedTuple):
    node: int
    """The deepest node whose path holds a beginning of the history; the newest of several."""
    history: list[Message]
    """The history, with the messages of that path as the trace holds them."""


def make_call_id(node: int, number: int) -> str:
    """Names a call to a program, where the model itself gave it no id."""
    return f"call_{node}_{number}"


def match_history(graph: TraceGraph, history: Sequence[Message]) -> MatchedHistory:
    """Messages are compared, not hashed: a re-sent history costs no more than reading it."""
    level = deepest = {ROOT: 0}
    for message in history:
        # Of turns with the same message, the one whose own call ids come back is meant.
        level = {
            child: score + likeness
            for node, score in level.items()
            for child in graph.children(node)
            if (likeness := _score_likeness(graph.nodes[child], message))
        }
        if not level:
            break
        deepest = level
    node = max(deepest, key=lambda n: (deepest[n], n))
    known = [graph.nodes[n].message for n in graph.path(node)]
    return MatchedHistory(node, known + list(history[len(known) :]))


def _score_likeness(node: Node, message: Message) -> int:
    recorded = node.message
    if recorded == message:
        return _SAME
    calls, sent = recorded.tool_calls, message.tool_calls
    has_lost_content = bool(calls) and not message.text
    if not (
        node.is_turn
        and message.role == "assistant"
        and (not message.reasoning or message.reasoning == recorded.reasoning)
        and (message.text == recorded.text or has_lost_content)
        and len(calls) == len(sent)
        and all(map(_is_same_call, calls, sent))
    ):
        return _OTHER
    ids = [make_call_id(node.id, k) for k in range(len(calls))]
    return _SAME if ids and [call.id for call in sent] == ids else _ALIKE


def _is_same_call(recorded: ToolCall, sent: ToolCall) -> bool:
    if recorded.name != sent.name or recorded.arguments == sent.arguments:
        return recorded.name == sent.name
    try:
        return _is_same_value(json.loads(recorded.arguments), json.loads(sent.arguments))
    except (ValueError, RecursionError):
        return False


def _is_same_value(one: Any, other: Any) -> bool:
    """Numbers by their value (1.0 comes back from JavaScript as 1), and true is no number."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _is_same_value(one[key], other[key]) for key in one
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same_value, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
