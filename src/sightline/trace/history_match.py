"""Recognizes a turn of the trace when an agent sends it back in another form.

Agents drop the reasoning, serialize the arguments of a call again, send null or parts for the
content, use the call ids that they were given, or give the assistant a name. These are still what
the model sampled, so the history continues from the sampled tokens. Any other difference is an
edit, and forks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from sightline.message import Message, ToolCall
from sightline.trace.graph import TraceGraph
from sightline.trace.node import ROOT, Node

_OTHER, _ALIKE, _SAME = range(3)


class MatchedHistory(NamedTuple):
    node: int
    """The deepest node whose path is a start of the history; the newest of several."""
    history: list[Message]
    """The history, with the messages of that path as the trace holds them."""


def make_call_id(node: int, number: int) -> str:
    """Return the id of a call for an agent, if the model gave it none."""
    return f"call_{node}_{number}"


def match_history(graph: TraceGraph, history: Sequence[Message]) -> MatchedHistory:
    """Find the start of `history` in the graph. Messages are compared, not hashed."""
    level = deepest = {ROOT: 0}
    for message in history:
        # Among turns with the same message, prefer the one whose call ids come back.
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
        return _canonicalize(recorded.arguments) == _canonicalize(sent.arguments)
    except (ValueError, RecursionError):
        return False


def _canonicalize(arguments: str) -> str:
    """Return JSON with sorted keys and with 1.0 as 1, as JavaScript writes it."""
    return json.dumps(json.loads(arguments, parse_float=_read_number), sort_keys=True)


def _read_number(spelled: str) -> float:
    number = float(spelled)
    return int(number) if number.is_integer() else number
