"""The mismatch of sampler and trainer: KL and ratio of every trained token, by its context.

Letters: S trained tokens of a step, N nodes that they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sightline.errors import Misaligned
from sightline.trace import Node, Trace
from sightline.wire.micro_batch import StepScores, TokenOrigin

NUM_WORST = 12
"""The number of worst tokens kept per step, for fresh tokens and for older ones."""
NO_IMAGE = -1
"""The bucket of tokens with no image before them."""

DIMENSIONS = ("turn", "distance", "image_tokens", "image_pixels", "num_images", "lag")
"""turn: which turn of its branch, from 0. distance: tokens since the last image. image_tokens and
image_pixels: the size of the last image. num_images: images before it. lag: versions between
sampling and training. Distances and sizes are counted in powers of two, by the exponent."""


@dataclass(frozen=True, slots=True)
class MismatchCell:
    """Sums over the tokens of one bucket."""

    tokens: int
    kl: float
    ratio: float
    worst: float


@dataclass(frozen=True, slots=True)
class WorstToken:
    rollout: int
    node: int
    place: int
    """Index of the token among those that the node sampled."""
    token_id: int
    lag: int
    kl: float
    ratio: float
    sampler: float
    trainer: float
    digest: str
    """Digest of the last image before the token. Empty without one."""
    distance: int


@dataclass
class StepMismatch:
    """The figures of one step. They can be added over steps."""

    cells: dict[tuple[str, int, bool], MismatchCell] = field(default_factory=dict)
    """Sums by dimension, bucket, and whether the version in training sampled the tokens."""
    worst: list[WorstToken] = field(default_factory=list)
    by_rollout: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """Mean KL, the ratio farthest from 1, mean advantage."""


@dataclass(frozen=True, slots=True)
class TokenContext:
    """The context of a node's sampled tokens, on its path from the root."""

    rollout: int
    node: int
    turn: int
    distance: int
    """Tokens between the last image and the first sampled token; NO_IMAGE without one."""
    image_tokens: int
    image_pixels: int
    num_images: int
    digest: str


def measure_mismatch(
    scores: StepScores, step: int, traces: Mapping[str, tuple[int, Trace]]
) -> StepMismatch:
    """Join scores with `traces`, which map an id to the rollout's number and trace.

    If the trainer cut a sample, only the tokens before the cut are joined.
    """
    joined = [_join_origin(origin, step, traces) for origin in scores.origins]
    if not joined:
        return StepMismatch()
    nodes = [node for node, _ in joined]
    around = [before for _, before in joined]
    spans = [np.arange(o.start, o.stop) for o in scores.origins]
    places = np.concatenate([np.arange(len(span)) for span in spans])
    order = np.concatenate(spans)
    lengths = [len(span) for span in spans]
    of_node = np.repeat(np.arange(len(nodes)), lengths)
    logprobs = [node.logprobs.numpy() for node in nodes]
    sampler = np.concatenate([x[:num] for x, num in zip(logprobs, lengths, strict=True)])
    trainer = scores.logprobs.numpy()[order]
    lags = np.maximum(0, step - 1 - _versions(nodes, lengths))
    log_ratio = trainer.astype(np.float64) - sampler.astype(np.float64)
    # The estimate r - 1 - log r of KL(sampler || trainer): never negative.
    kl = np.expm1(log_ratio) - log_ratio
    mismatch = StepMismatch(_sum_cells(around, of_node, places, lags, kl, np.exp(log_ratio)))
    falling = np.argsort(kl)[::-1]
    for fresh in (True, False):
        for at in falling[(lags[falling] == 0) == fresh][:NUM_WORST]:
            n = of_node[at]
            before = around[n]
            first = nodes[n].sampled_start
            mismatch.worst.append(
                WorstToken(
                    before.rollout,
                    before.node,
                    int(places[at]),
                    int(nodes[n].token_ids.numpy()[first + places[at]]),
                    int(lags[at]),
                    float(kl[at]),
                    float(np.exp(log_ratio[at])),
                    float(sampler[at]),
                    float(trainer[at]),
                    before.digest,
                    NO_IMAGE if not before.num_images else before.distance + int(places[at]),
                )
            )
    rollouts = np.array([before.rollout for before in around])[of_node]
    mismatch.by_rollout = _by_rollout(rollouts, kl, log_ratio, scores.advantages.numpy()[order])
    return mismatch


def _join_origin(
    origin: TokenOrigin, step: int, traces: Mapping[str, tuple[int, Trace]]
) -> tuple[Node, TokenContext]:
    rollout, trace = traces.get(origin.trace_id, (0, Trace(id="")))
    nodes = trace.nodes[origin.node : origin.node + 1] if origin.node >= 0 else []
    if not nodes or nodes[0].num_sampled < origin.stop - origin.start:
        raise Misaligned(
            f"step {step} trained {origin.stop - origin.start} tokens of node {origin.node} of "
            f"{origin.trace_id}, which the traces of the step do not have",
            "the run directory is incomplete, or holds files of two runs. Copy it again",
        )
    [node] = nodes
    path = trace.path(node.id)
    slots = [slot for n in path for slot in trace.nodes[n].slots]
    ref = slots[-1].item.ref if slots else None
    return node, TokenContext(
        rollout=rollout,
        node=node.id,
        turn=sum(trace.nodes[n].is_turn for n in path) - 1,
        distance=_find_distance(trace, path),
        image_tokens=floor_log2(slots[-1].length) if slots else NO_IMAGE,
        image_pixels=floor_log2(ref.width * ref.height) if ref else NO_IMAGE,
        num_images=len(slots),
        digest=ref.digest if ref else "",
    )


def _find_distance(trace: Trace, path: Sequence[int]) -> int:
    between = trace.nodes[path[-1]].sampled_start
    for n in reversed(path):
        node = trace.nodes[n]
        if n != path[-1]:
            between += len(node.token_ids)
        if node.slots:
            last = node.slots[-1]
            return between - last.offset - last.length
    return NO_IMAGE


def _versions(nodes: Sequence[Node], lengths: Sequence[int]) -> np.ndarray:
    """Return (S,): the versions of the first `lengths` sampled tokens of each node."""
    versions = []
    for node, length in zip(nodes, lengths, strict=True):
        sizes = [span.stop - span.start for span in node.versions]
        versions.append(np.repeat([span.version for span in node.versions], sizes)[:length])
    return np.concatenate(versions)


def floor_log2(value: int) -> int:
    """Return the exponent of the largest power of two up to `value`."""
    return max(0, value.bit_length() - 1)


def _sum_cells(
    around: Sequence[TokenContext],
    of_node: np.ndarray,
    places: np.ndarray,
    lags: np.ndarray,
    kl: np.ndarray,
    ratio: np.ndarray,
) -> dict[tuple[str, int, bool], MismatchCell]:
    def spread(name: str) -> np.ndarray:
        return np.array([getattr(before, name) for before in around])[of_node]

    names = ("turn", "image_tokens", "image_pixels", "num_images")
    buckets = {name: spread(name) for name in names}
    far = np.log2(np.maximum(spread("distance"), 0) + places + 1).astype(np.int64)
    buckets["distance"] = np.where(buckets["num_images"] > 0, far, NO_IMAGE)
    buckets["lag"] = lags
    cells: dict[tuple[str, int, bool], MismatchCell] = {}
    for fresh in (True, False):
        chosen = (lags == 0) == fresh
        for dimension, every in buckets.items():
            mine = every[chosen]
            for bucket in np.unique(mine):
                at = mine == bucket
                of_kl = kl[chosen][at]
                cells[dimension, int(bucket), fresh] = MismatchCell(
                    len(of_kl), float(of_kl.sum()), float(ratio[chosen][at].sum()),
                    float(of_kl.max()),
                )  # fmt: skip
    return cells


def _by_rollout(
    rollouts: np.ndarray, kl: np.ndarray, log_ratio: np.ndarray, advantages: np.ndarray
) -> dict[int, tuple[float, float, float]]:
    order = np.argsort(rollouts, kind="stable")
    ids, starts = np.unique(rollouts[order], return_index=True)
    figures = {}
    for rollout, at in zip(ids, np.split(order, starts[1:]), strict=True):
        far = log_ratio[at][np.abs(log_ratio[at]).argmax()]
        figures[int(rollout)] = (
            float(kl[at].mean()), float(np.exp(far)), float(advantages[at].mean()),
        )  # fmt: skip
    return figures
