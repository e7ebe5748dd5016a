"""Micro-batches to ranks: as many for each, so that every rank takes part in every collective."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch


def spread(packs: Sequence[MicroBatch], ranks: int) -> list[list[int | None]]:
    """For each rank the places of its micro-batches, a round a place; None is an empty one.

    The costliest goes to the rank that has least. A rank's micro-batches with images come first,
    so that few rounds need the vision tower on ranks that show none. The same packs give the same
    answer on every machine.
    """
    order = sorted(range(len(packs)), key=lambda i: (-_cost(packs[i]), i))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for place in order:
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(place)
        loads[rank] += _cost(packs[place])
    rounds = max(map(len, shares), default=0)
    return [
        [*sorted(share, key=lambda i: (not packs[i].items, i)), *[None] * (rounds - len(share))]
        for share in shares
    ]


def empty_micro_batch(step: int, num_axes: int) -> MicroBatch:
    """One token that nobody trains."""
    none = Array.of([], "float32")
    return MicroBatch(
        step=step,
        token_ids=Array.of([0], "int32"),
        positions=Array.of([[0]] * num_axes, "int32"),
        subtree_end=Array.of([1], "int32"),
        parent=Array.of([-1], "int32"),
        trained=Array.of([], "int32"),
        logprobs=none,
        advantages=none,
        loss_weight=none,
        versions=Array.of([], "int32"),
        items=[],
        slots=[],
        origins=[],
    )


def _cost(pack: MicroBatch) -> int:
    return len(pack.token_ids) + pack.num_patches
