"""Assigns micro-batches to ranks, the same number to each, because collectives need every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from sightline.pack.cost import CostModel, MicroBatchWork
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch


def assign_to_ranks(
    packs: Sequence[MicroBatch], ranks: int, price: CostModel
) -> list[list[int | None]]:
    """Return the places of each rank's micro-batches, one per round; None for an empty one.

    Ranks wait for one another in every layer of a round, so a round lasts as long as its costliest
    micro-batch. Micro-batches of similar cost share a round. The costliest goes to the rank with
    the least work. Those with images come first, so that few rounds need the vision tower on
    ranks without one. The same packs and price give the same result on every machine.
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


def build_empty_micro_batch(step: int, num_axes: int, num_tokens: int = 1) -> MicroBatch:
    """Return a micro-batch of tokens that do not train: one for each rank that divides them."""
    places = list(range(num_tokens))
    none = Array.of([], "float32")
    return MicroBatch(
        step=step,
        token_ids=Array.of([0] * num_tokens, "int32"),
        positions=Array.of([places] * num_axes, "int32"),
        subtree_end=Array.of([num_tokens] * num_tokens, "int32"),
        parent=Array.of([place - 1 for place in places], "int32"),
        trained=Array.of([], "int32"),
        logprobs=none,
        advantages=none,
        loss_weight=none,
        versions=Array.of([], "int32"),
        items=[],
        slots=[],
        origins=[],
    )
