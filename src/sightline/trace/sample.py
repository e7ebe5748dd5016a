"""Convert branches to samples. Each sampled node trains in exactly one sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sightline.errors import Misaligned
from sightline.trace.node import Node
from sightline.trace.trace import Trace
from sightline.wire import Array, MediaItem, Slot, VideoStep
from sightline.wire.sample import Sample, Segment

ItemKey = tuple[str, str, VideoStep | None]


def flatten(
    trace: Trace, get_advantage: Callable[[Node], float | None] | None = None
) -> list[Sample]:
    """Return samples from `trace` that train every turn exactly once.

    `get_advantage` returns the advantage of a turn, or None to use the turn as context. Without it,
    every turn trains, and the trainer's algorithm computes the advantages. A node trains in the
    first path of `Trace.split_turns` that contains it, and is context in the others.
    """
    advantage_of: dict[int, float | None] = {}
    for node in trace.turns:
        advantage = get_advantage(node) if get_advantage else None
        if get_advantage is None or advantage is not None:
            advantage_of[node.id] = advantage
    return [
        _build_sample(trace, path, {n: advantage_of[n] for n in turns})
        for path, turns in trace.split_turns(advantage_of)
    ]


def _build_sample(
    trace: Trace, path: Sequence[int], advantage_of: Mapping[int, float | None]
) -> Sample:
    if trace.reward is None:
        raise Misaligned(
            f"trace {trace.id} has no reward", "a rollout that did not end does not train"
        )
    trained, versions, logprobs = list[np.ndarray](), list[int](), list[np.ndarray]()
    advantages = list[float]()
    turn_of = {node.id: turn for turn, node in enumerate(trace.turns)}
    segments, start = list[Segment](), 0
    items, slots = dict[ItemKey, tuple[int, MediaItem]](), list[Slot[int]]()
    for node in (trace.nodes[n] for n in path):
        for slot in node.slots:
            # The parts of an item's key. Hashing them is unnecessary.
            key = (slot.item.ref.digest, slot.item.fingerprint, slot.item.step)
            place, _ = items.setdefault(key, (len(items), slot.item))
            slots.append(Slot(start + slot.offset, slot.length, place, slot.pixel_digest))
        stop = start + len(node.token_ids)
        if node.id in advantage_of:
            first = start + node.sampled_start
            trained.append(np.arange(first, stop, dtype=np.int32))
            logprobs.append(node.logprobs.numpy())
            if (advantage := advantage_of[node.id]) is not None:
                advantages += [advantage] * node.num_sampled
            for span in node.versions:
                versions += [span.version] * (span.stop - span.start)
            segments.append(Segment(first, stop, node=node.id, turn=turn_of[node.id]))
        start = stop
    return Sample(
        trace_id=trace.id,
        group_id=trace.group_id,
        env=trace.env,
        reward=trace.reward,
        token_ids=Array.of(
            np.concatenate([trace.nodes[n].token_ids.numpy() for n in path]), "int32"
        ),
        trained=Array.of(np.concatenate(trained), "int32"),
        logprobs=Array.of(np.concatenate(logprobs), "float32"),
        versions=Array.of(versions, "int32"),
        segments=segments,
        items=[item for _, item in items.values()],
        slots=slots,
        advantages=None if None in advantage_of.values() else Array.of(advantages, "float32"),
        turn_rewards=trace.per_turn,
        turn_origins=trace.turn_origins(),
        temperature=trace.temperature,
        routes=_join_routes([trace.nodes[n] for n in path]),
    )


def _join_routes(nodes: Sequence[Node]) -> Array | None:
    """Return the routes of each token. In a node, each token has those of the token before."""
    known = next((node.routes for node in nodes if node.routes is not None), None)
    if known is None:
        return None
    unknown = np.iinfo(known.dtype).max
    rows = [
        np.full((len(node.token_ids), *known.shape[1:]), unknown, known.dtype)
        if node.routes is None
        else node.routes.numpy()
        for node in nodes
    ]
    routes = np.concatenate(rows)
    return Array.of(np.concatenate([routes[1:], np.full_like(routes[:1], unknown)]), known.dtype)
