"""The first difference between two traces. Ids and times of rollouts are not compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from sightline.render import Renderer
from sightline.trace.node import Node
from sightline.trace.trace import Trace
from sightline.view.trace_replay import describe_tokens, first_difference

_FIELDS_BEFORE_NODES = ("env", "task", "split", "seed", "temperature")
_FIELDS_AFTER_NODES = (
    "forks", "reward", "rewards", "per_turn", "truncated", "limit", "error", "error_kind",
    "refused_requests",
)  # fmt: skip
_NODE_FIELDS = ("message", "sampled_start", "slots", "finish_reason", "versions")


class TraceDifference(NamedTuple):
    where: str
    one: str
    other: str


def find_trace_difference(
    one: Trace, other: Trace, renderer: Renderer | None = None
) -> TraceDifference | None:
    """Return the first difference in the order of events, or None.

    A `renderer` decodes the tokens around it.
    """
    for where, a, b in _list_fields(one, other):
        if a == b:
            continue
        if where.endswith("token"):
            at = first_difference(a, b)
            if where.endswith("sampled token"):
                return TraceDifference(f"{where} {at}", f"{a[at]}", f"{b[at]}")
            texts = (describe_tokens(ids, at, renderer) for ids in (a, b))
            return TraceDifference(f"{where} {at}", *texts)
        return TraceDifference(where, f"{a!r}", f"{b!r}")
    return None


def _list_fields(one: Trace, other: Trace) -> Iterator[tuple[str, Any, Any]]:
    for name in _FIELDS_BEFORE_NODES:
        yield name, getattr(one, name), getattr(other, name)
    for number, (a, b) in enumerate(zip_longest(one.nodes, other.nodes)):
        if a is None or b is None:
            yield f"node {number}", _describe_node(a), _describe_node(b)
            return
        where = f"node {a.id} ({a.message.role})"
        yield f"{where}, parent", a.parent, b.parent
        yield f"{where}, token", a.token_ids.numpy().tolist(), b.token_ids.numpy().tolist()
        for name in _NODE_FIELDS:
            yield f"{where}, {name}", getattr(a, name), getattr(b, name)
        logprobs = (node.logprobs.numpy().tolist() for node in (a, b))
        yield f"{where}, logprob of sampled token", *logprobs
        yield f"{where}, tools", one.get_toolset(a.tools), other.get_toolset(b.tools)
    for name in _FIELDS_AFTER_NODES:
        yield name, getattr(one, name), getattr(other, name)


def _describe_node(node: Node | None) -> str:
    return "no such node" if node is None else f"{node.message.role}: {node.message.text!r}"
