"""Packs samples into micro-batches, as trees where sharing saves enough, else as rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sightline.algo.credit import AggregationFunction, by_tokens
from sightline.families import Family
from sightline.pack.build import build_micro_batch
from sightline.pack.cost import PackSize
from sightline.pack.tree import PackRow, PackUnit, build_units, measure_unit
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.sample import Sample


def pack(
    samples: Sequence[Sample],
    step: int,
    family: Family,
    limit: PackSize,
    aggregation: AggregationFunction = by_tokens,
) -> list[MicroBatch]:
    """Pack samples into micro-batches. `aggregation` gives the weight of their trained tokens.

    The same samples give the same packs, in every process and after every restart. A sample that
    is larger than `limit` gets a micro-batch of its own.
    """
    weights = aggregation(np.array([len(sample.trained) for sample in samples], dtype=np.int64))
    weight_of = {id(sample): float(w) for sample, w in zip(samples, weights, strict=True)}
    if family.packing.kind == "tree":
        units = build_units(samples, limit)
    else:
        units = [[PackRow(sample)] for sample in samples]
    bins = _fill_bins(units, limit, pads=family.packing.kind == "rows")
    return [build_micro_batch(members, step, family, weight_of) for members in bins]


def _fill_bins(units: Sequence[PackUnit], limit: PackSize, pads: bool) -> list[list[PackUnit]]:
    """Fill bins by first fit, longest first: few bins, each with rows of similar length.

    Trees and single rows do not share a bin, because single rows need no mask. If the forward pass
    `pads`, each row counts as many tokens as the first row of its bin.
    """
    costs = [measure_unit(unit) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (-costs[i].tokens, i))
    kinds: dict[tuple[float, bool], list[tuple[PackSize, list[PackUnit]]]] = {}
    for i in order:
        unit, cost = units[i], costs[i]
        bins = kinds.setdefault((unit[0].sample.temperature, len(unit) > 1), [])
        for place, (used, members) in enumerate(bins):
            longest = used.tokens // len(members)
            total = used + (PackSize(longest, cost.patches) if pads else cost)
            if total.fits(limit):
                members.append(unit)
                bins[place] = (total, members)
                break
        else:
            bins.append((cost, [unit]))
    return [members for bins in kinds.values() for _, members in bins]
