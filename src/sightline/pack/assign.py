"""Micro-batches to ranks: as many for each, so that every rank takes part in every collective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from sightline.pack.cost import CostModel, MicroBatchWork
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch


def assign_to_ranks(
    packs: Sequence[MicroBatch], ranks: int, price: CostModel
) -> list[list[int | None]]:
    """For each rank the places of its micro-batches, a round a place; None is an empty one.

    Ranks wait for one another in every layer of a round, so a round lasts as long as its costliest
    micro-batch: those of like cost go into one, the costliest to the rank that has least so far.
    Micro-batches with items come first, so that few rounds need the vision tower on ranks that
    show none. The same packs and price give the same answer on every machine.
    """
    costs = [price.of(MicroBatchWork.of(pack)) for pack in packs]
    order = sorted(range(len(packs)), key=lambda i: (not packs[i].items, -costs[i], i))
    shares: list[list[int | None]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for start in range(0, len(order), ranks):
        beside = sorted(order[start : start + ranks], key=lambda i: (-costs[i], i))
        lightest = sorted(range(ranks), key=lambda r: (loads[r], r))
        for rank, place in zip_longest(lightest, beside):
            shares[rank].append(place)
            loads[rank] += 0.0 if place is None else costs[place]
    return shares


def build_empty_micro_batch(step: int, num_axes: int) -> MicroBatch:
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
