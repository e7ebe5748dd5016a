"""Scores of a batch before its first update, and the advantages that depend on them.

every rank: values, teacher logprobs --gather--> rank 0: advantages(batch) --> every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from msgspec.structs import replace as replace_fields
from torch import Tensor

from sightline.algo.algorithm import Algorithm, RolloutBatch, compute_advantages
from sightline.errors import Misaligned
from sightline.trainer.feed import ReadyMicroBatch
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, TokenOrigin
from sightline.wire.sample import Sample

AdvantageTable = Mapping[tuple[str, int], np.ndarray]
"""The advantages of every node's sampled tokens, by trace and node."""


@dataclass(frozen=True, slots=True)
class PriorScores:
    """Numbers per trained token of a micro-batch, by the weights before the first update."""

    logprobs: Float[Tensor, " tokens"]
    values: Float[Tensor, " tokens"] | None = None
    teacher_logprobs: Float[Tensor, " tokens"] | None = None


@dataclass(frozen=True, slots=True)
class HostScores:
    """Values and teacher logprobs of a micro-batch, on their way to rank 0."""

    origins: list[TokenOrigin]
    values: np.ndarray | None
    teacher_logprobs: np.ndarray | None

    @classmethod
    def of(cls, batch: MicroBatch, scores: PriorScores) -> HostScores:
        arrays = (
            None if tensor is None else tensor.float().cpu().numpy()
            for tensor in (scores.values, scores.teacher_logprobs)
        )
        return cls(batch.origins, *arrays)


def build_advantage_table(
    algorithm: Algorithm, rollouts: RolloutBatch, scores: Iterable[HostScores]
) -> AdvantageTable:
    """Compute the advantages of the whole batch from the scores of all ranks."""
    scores = list(scores)
    batch = replace(
        rollouts,
        values=_align([(s.origins, s.values) for s in scores], rollouts.samples),
        teacher_logprobs=_align(
            [(s.origins, s.teacher_logprobs) for s in scores], rollouts.samples
        ),
    )
    table: dict[tuple[str, int], np.ndarray] = {}
    for sample, advantages in zip(batch.samples, compute_advantages(algorithm, batch), strict=True):
        at = 0
        for segment in sample.segments:
            stop = at + segment.stop - segment.start
            table[sample.trace_id, segment.node] = advantages[at:stop]
            at = stop
    return table


def _align(
    scored: Sequence[tuple[list[TokenOrigin], np.ndarray | None]], samples: Sequence[Sample]
) -> list[np.ndarray] | None:
    """Return the scores sample by sample, NaN for tokens that no micro-batch holds."""
    by_node: dict[tuple[str, int], np.ndarray] = {}
    for origins, numbers in scored:
        if numbers is None:
            return None
        for origin in origins:
            by_node[origin.trace_id, origin.node] = numbers[origin.start : origin.stop]
    aligned = []
    for sample in samples:
        rows = [np.zeros(0, dtype=np.float32)]
        for segment in sample.segments:
            row = np.full(segment.stop - segment.start, np.nan, dtype=np.float32)
            known = by_node.get((sample.trace_id, segment.node), row[:0])
            row[: len(known)] = known
            rows.append(row)
        aligned.append(np.concatenate(rows))
    return aligned


def set_advantages(ready: ReadyMicroBatch, table: AdvantageTable) -> ReadyMicroBatch:
    """Return the micro-batch with its advantages from the table."""
    rows = [np.zeros(0, dtype=np.float32)]
    for origin in ready.batch.origins:
        rows.append(table[origin.trace_id, origin.node][: origin.stop - origin.start])
    advantages = np.concatenate(rows)
    if not np.isfinite(advantages).all():
        raise Misaligned(
            f"step {ready.batch.step}: an advantage of a trained token is not finite",
            "let the algorithm's advantages use the NaN values of dropped tokens nowhere else",
        )
    array = Array.of(advantages, "float32")
    return replace(ready, batch=replace_fields(ready.batch, advantages=array))
