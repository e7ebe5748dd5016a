"""Where two traces first differ. Names and times of the rollouts are left out of the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from sightline.render import Renderer
from sightline.trace.node import Node
from sightline.trace.trace import Trace
from sightline.view.trace_replay import describe_tokens, first_difference

_FIELDS_BEFORE_NODES = ("env", "task", "split", "seed", "temperature")
_FIELDS_AFTER_NODES = (
    "forks", "reward", "rewards", "per_turn", "truncated", "limit", "error", "error_kind",
    "refused_requests",
)  # fmt: skip
_NODE_FIELDS = ("parent", "message", "sampled_start", "slots", "finish_reason", "versions")


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """The first place where two traces differ, and what each has there."""

    where: str
    one: str
    other: str


def find_trace_difference(
    one: Trace, other: Trace, renderer: Renderer | None = None
) -> TraceDifference | None:
    """The first difference in the order in which things happened; None when there is none.

    A `renderer` spells out the tokens around it.
    """
    for name in _FIELDS_BEFORE_NODES:
        if (found := _compare_field(name, one, other)) is not None:
            return found
    for a, b in zip_longest(one.nodes, other.nodes):
        if a is None or b is None:
            return TraceDifference(
                f"node {min(len(one.nodes), len(other.nodes))}",
                _describe_node(a),
                _describe_node(b),
            )
        if (found := _compare_nodes(a, b, one, other, renderer)) is not None:
            return found
    for name in _FIELDS_AFTER_NODES:
        if (found := _compare_field(name, one, other)) is not None:
            return found
    return None


def _compare_nodes(
    a: Node, b: Node, one: Trace, other: Trace, renderer: Renderer | None
) -> TraceDifference | None:
    where = f"node {a.id} ({a.message.role})"
    if a.parent == b.parent and a.token_ids != b.token_ids:
        ids, others = (node.token_ids.numpy().tolist() for node in (a, b))
        at = first_difference(ids, others)
        return TraceDifference(
            f"{where}, token {at}",
            describe_tokens(ids, at, renderer),
            describe_tokens(others, at, renderer),
        )
    for name in _NODE_FIELDS:
        if (found := _compare_field(name, a, b)) is not None:
            return TraceDifference(f"{where}, {found.where}", found.one, found.other)
    if a.logprobs != b.logprobs:
        logprobs, others = (node.logprobs.numpy().tolist() for node in (a, b))
        at = first_difference(logprobs, others)
        return TraceDifference(
            f"{where}, logprob of sampled token {at}", f"{logprobs[at]}", f"{others[at]}"
        )
    tools, more = one.get_toolset(a.tools), other.get_toolset(b.tools)
    return (
        None
        if tools == more
        else TraceDifference(f"{where}, tools", tools or "none", more or "none")
    )


def _compare_field(name: str, one: Any, other: Any) -> TraceDifference | None:
    a, b = getattr(one, name), getattr(other, name)
    return None if a == b else TraceDifference(name, f"{a!r}", f"{b!r}")


def _describe_node(node: Node | None) -> str:
    return "no such node" if node is None else f"{node.message.role}: {node.message.text!r}"
