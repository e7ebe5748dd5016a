"""Computes a micro-batch's loss, and the scores of its trained tokens.

Scores from before the first update give the advantages that depend on values or a teacher:

    every rank: values, teacher logprobs --gather--> rank 0: advantages(batch) --> every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from msgspec.structs import replace as replace_fields
from torch import Tensor

from sightline.algo.algorithm import Algorithm, RolloutBatch, compute_advantages
from sightline.algo.losses import LossInputs
from sightline.compute.logprobs import Temperature, chosen_logprobs
from sightline.config import TrainerConfig
from sightline.errors import Misaligned
from sightline.families import Family, Forward
from sightline.families.device_copy import copy_to_device
from sightline.trainer.feed import ReadyMicroBatch
from sightline.trainer.forward_pass import (
    ContextShare,
    FrozenModel,
    FrozenTowerFeatures,
    compute_hidden,
    use_routes,
)
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.shard import ShardedModel, call_gathered, release_gathered
from sightline.trainer.token_scores import score_tokens
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, TokenOrigin
from sightline.wire.sample import Sample


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """The loss of a micro-batch, with numbers per trained token."""

    total: Float[Tensor, ""]
    logprobs: Float[Tensor, " tokens"]
    metrics: dict[str, Tensor]
    routes: Int[Tensor, "kinds=2"] | None = None
    """The numbers of differing and compared routes."""


@dataclass(kw_only=True)
class LossComputer:
    """Holds the model, and the frozen models and the value head that the algorithm needs."""

    forward: Forward
    algorithm: Algorithm
    family: Family
    config: TrainerConfig
    pad_ids: tuple[int, ...]
    device: torch.device
    dims: ParallelDims = field(default_factory=ParallelDims)
    sharded: ShardedModel | None = None
    """Gathers the model's parameters around a call; None if one rank holds all of them."""
    features: FrozenTowerFeatures | None = None
    """Features of a frozen vision tower; None if the tower trains."""
    reference: FrozenModel | None = None
    """The run's initial checkpoint, frozen."""
    teacher: FrozenModel | None = None
    value_head: torch.nn.Module | None = None
    """Maps hidden states to values, as a part of the model."""
    exact: bool = False
    """Whether logprobs are bit-identical to the sampler's (`[model] exact`)."""
    replays_routes: bool = True
    """Whether tokens are computed by the sampler's experts (`[model] router_replay`)."""
    banned: Int[Tensor, " ids"] = field(init=False)
    """Token ids that the softmax excludes."""

    def __post_init__(self) -> None:
        self.banned = torch.tensor(self.pad_ids, dtype=torch.long, device=self.device)

    @torch.no_grad()
    def score_only(self, ready: ReadyMicroBatch) -> PriorScores:
        """Score the trained tokens with the model, its value head and the teacher."""
        share = self._share(ready)
        tokens, temperature = self._trained_ids(ready.batch, share), self._temperature(ready.batch)

        def score() -> tuple[Tensor, Tensor | None]:
            hidden = self._hidden(ready, share)
            values = self._values(hidden, share)
            logprobs = chosen_logprobs(self.forward, hidden, tokens, self.banned, temperature)
            return share.join(logprobs), values

        def score_by_teacher(teacher: FrozenModel) -> Tensor:
            hidden = self._frozen_hidden(teacher, ready, share)
            logprobs = chosen_logprobs(teacher.forward, hidden, tokens, self.banned, temperature)
            return share.join(logprobs)

        logprobs, values = call_gathered(self.sharded, score)
        release_gathered(self.sharded)
        teacher_logprobs = None
        if (teacher := self.teacher) is not None:
            teacher_logprobs = call_gathered(teacher.sharded, lambda: score_by_teacher(teacher))
        elif self.algorithm.needs.teacher_logprobs:
            teacher_logprobs = self._read_teacher_logprobs(ready.batch)
        return PriorScores(logprobs, values, teacher_logprobs)

    def _read_teacher_logprobs(self, batch: MicroBatch) -> Float[Tensor, " tokens"]:
        """Return the logprobs that a server computed before the batch was written."""
        if batch.teacher_logprobs is None and len(batch.trained):
            raise Misaligned(
                f"step {batch.step}: [algorithm] teacher_server is set, but the batch has no "
                "logprobs of the teacher",
                "resume the run with the settings that it was started with",
            )
        given = batch.logprobs if batch.teacher_logprobs is None else batch.teacher_logprobs
        return copy_to_device(given.numpy().copy(), self.device)

    def compute_loss(self, ready: ReadyMicroBatch, prior: PriorScores | None) -> MicroBatchLoss:
        """Compute a micro-batch's loss: hidden states, scores, the algorithm, token weights."""
        batch, share = ready.batch, self._share(ready)
        hidden = self._hidden(ready, share)
        routing = getattr(self.forward, "routing", None)
        routes = None if routing is None else routing.count_differing()
        if routes is not None:
            routes = share.sum(routes)
        reference_hidden = None
        if self.reference is not None:
            with torch.no_grad():
                reference_hidden = self._frozen_hidden(self.reference, ready, share)
        scores = score_tokens(
            (self.forward, None if self.reference is None else self.reference.forward),
            (hidden, reference_hidden),
            self._trained_ids(batch, share),
            self.banned,
            self._temperature(batch),
            self.algorithm.needs,
            backend="" if self.exact else self.config.compile_backend,
        ).map(share.join)
        sampler_logprobs, advantages, loss_weight = (
            copy_to_device(array.numpy().copy(), self.device)
            for array in (batch.logprobs, batch.advantages, batch.loss_weight)
        )
        lengths = [origin.stop - origin.start for origin in batch.origins]
        sequence_ids = copy_to_device(np.repeat(np.arange(len(lengths)), lengths), self.device)
        old = scores.logprobs.detach() if prior is None else prior.logprobs
        token_loss, metrics = self.algorithm.loss(
            LossInputs(
                scores.logprobs,
                sampler_logprobs,
                advantages,
                sequence_ids,
                batch.origins,
                reference_logprobs=scores.reference_logprobs,
                kl=scores.kl,
                entropy=scores.entropy,
                old_logprobs=old if self.algorithm.needs.old_logprobs else None,
                values=self._values(hidden, share),
                old_values=None if prior is None else prior.values,
                teacher_logprobs=None if prior is None else prior.teacher_logprobs,
            )
        )
        total = (token_loss * loss_weight).sum()
        if self.dims.is_distributed:
            # Every parameter needs a gradient on every rank, even if no token trains here.
            total = total + self.forward.logits(hidden[:0]).float().sum()
            if self.value_head is not None:
                total = total + self.value_head(hidden[:0]).float().sum()
        return MicroBatchLoss(total, scores.logprobs.detach(), metrics, routes)

    def _share(self, ready: ReadyMicroBatch) -> ContextShare:
        return ContextShare(ready.batch, self.dims.context_group)

    def _frozen_hidden(
        self, frozen: FrozenModel, ready: ReadyMicroBatch, share: ContextShare
    ) -> Float[Tensor, "own hidden"]:
        return compute_hidden(
            frozen.forward, ready, self.family, self.device, frozen.features, share=share
        )

    def _hidden(self, ready: ReadyMicroBatch, share: ContextShare) -> Float[Tensor, "own hidden"]:
        use_routes(self.forward, ready.batch, self.device, self.replays_routes, share)
        return compute_hidden(
            self.forward, ready, self.family, self.device, self.features, self.exact, share
        )

    def _values(
        self, hidden: Float[Tensor, "own hidden"], share: ContextShare
    ) -> Float[Tensor, " tokens"] | None:
        return None if self.value_head is None else share.join(self.value_head(hidden).float())

    def _temperature(self, batch: MicroBatch) -> Temperature:
        if not self.exact:
            return batch.temperature
        return torch.full((1, 1), batch.temperature, device=self.device)

    def _trained_ids(self, batch: MicroBatch, share: ContextShare) -> Int[Tensor, " own"]:
        ids = batch.token_ids.numpy()[batch.trained.numpy()[share.trained]].astype(np.int64)
        return copy_to_device(ids, self.device)


AdvantageTable = Mapping[tuple[str, int], np.ndarray]
"""The advantages of every node's sampled tokens, by trace and node."""
HostScores = tuple[list[TokenOrigin], dict[str, np.ndarray | None]]
"""The origins of a micro-batch and its scores by field of `RolloutBatch`, as sent to rank 0."""


class PriorScores(NamedTuple):
    """Scores per trained token of a micro-batch, from the weights before the first update."""

    logprobs: Float[Tensor, " tokens"]
    values: Float[Tensor, " tokens"] | None = None
    teacher_logprobs: Float[Tensor, " tokens"] | None = None

    def take(self, places: Int[np.ndarray, " taken"]) -> PriorScores:
        at = torch.from_numpy(places).to(self.logprobs.device)
        return PriorScores(self.logprobs[at], *(None if x is None else x[at] for x in self[1:]))

    @staticmethod
    def join(parts: Sequence[tuple[PriorScores, Bool[np.ndarray, " trained"]]]) -> PriorScores:
        """Join the parts of a micro-batch. Each has a mask of the trained tokens that it holds."""
        logprobs, *others = zip(*(scores for scores, _ in parts), strict=True)
        joined = PriorScores(
            torch.cat(logprobs), *(None if x[0] is None else torch.cat(x) for x in others)
        )
        return joined.take(np.argsort(np.concatenate([np.flatnonzero(held) for _, held in parts])))


SCORES = ("policy_logprobs", "values", "teacher_logprobs")
"""The fields of `RolloutBatch` that hold the fields of `PriorScores`, in their order."""


def to_host(scores: PriorScores) -> dict[str, np.ndarray | None]:
    """Return a micro-batch's scores by field of `RolloutBatch`."""
    fields = zip(SCORES, scores, strict=True)
    return {k: None if v is None else v.float().cpu().numpy() for k, v in fields}


def build_advantage_table(
    algorithm: Algorithm, rollouts: RolloutBatch, scores: Sequence[HostScores]
) -> AdvantageTable:
    """Compute the advantages of the whole batch from the scores of all ranks."""
    aligned: dict[str, Any] = {
        name: _align([(origins, fields[name]) for origins, fields in scores], rollouts.samples)
        for name in SCORES
    }
    batch = replace(rollouts, **aligned)
    return {
        (sample.trace_id, segment.node): advantages[places]
        for sample, advantages in zip(
            batch.samples, compute_advantages(algorithm, batch), strict=True
        )
        for segment, places in sample.place_segments()
    }


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
