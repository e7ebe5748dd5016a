"""Match turns of the trace that an agent sends back in a different form.

Agents may drop the reasoning, serialize a call's arguments again, send null or parts as content,
use the call ids they received, or give the assistant a name. Such a message is still the sampled
one, so the history continues from the sampled tokens. Any other difference is an edit and creates a
fork.
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
    """The deepest node whose path is a prefix of the history. The newest if there are several."""
    history: list[Message]
    """The history, with the trace's own messages for that path."""


def make_call_id(node: int, number: int) -> str:
    """Return the call id to send to an agent if the model did not write one."""
    return f"call_{node}_{number}"


def match_history(graph: TraceGraph, history: Sequence[Message]) -> MatchedHistory:
    """Find the longest prefix of `history` in the graph. Messages are compared, not hashed."""
    level = deepest = {ROOT: 0}
    for message in history:
        # Among turns with the same message, prefer the one whose call ids were sent back.
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
    """Return JSON with sorted keys, and with 1.0 as 1 like in JavaScript."""
    return json.dumps(json.loads(arguments, parse_float=_read_number), sort_keys=True)


def _read_number(spelled: str) -> float:
    number = float(spelled)
    return int(number) if number.is_integer() else number
