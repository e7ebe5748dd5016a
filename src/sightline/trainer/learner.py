"""One optimizer step: forward, loss and backward over micro-batches, then the update.

Letters: T tokens, S trained tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from sightline.algo.losses import LossFunction, LossInputs, mismatch_kl
from sightline.compute.attention import build_attention_pattern
from sightline.compute.logprobs import chosen_logprobs
from sightline.config import TrainerConfig
from sightline.errors import TrainingDiverged
from sightline.families import Family, Forward
from sightline.families.device_copy import copy_to_device
from sightline.pixels import PixelCacheStats
from sightline.trainer.alignment_checks import check_features, check_micro_batch, check_patches
from sightline.trainer.blocks import count_compiled_graphs
from sightline.trainer.features import FrozenTowerFeatures, encode_blank
from sightline.trainer.feed import ReadyBatch, ReadyMicroBatch
from sightline.trainer.metric_sums import MetricSums
from sightline.trainer.optimizer import lr_scale, set_learning_rate
from sightline.trainer.probe import ImageSwapProbe, pick_probe_micro_batch, probe, run_probe_passes
from sightline.trainer.ranks import RankInfo
from sightline.trainer.shard import (
    ShardedModel,
    all_gather_list,
    full_tensor,
    gather_to_lead,
    sum_over_ranks,
)
from sightline.trainer.step_timer import StepTimer
from sightline.trainer.token_scores import TokenScorer, TokenScores
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, TokenOrigin
from sightline.wire.score import StepScores

T = TypeVar("T")
SUM_NAMES = (
    "all_tokens", "clipped", "entropy", "fresh_kl", "fresh_tokens", "kl_ref", "loss", "older_kl",
    "older_tokens", "tokens",
)  # fmt: skip
_DIVERGED_FIX = (
    "start a new run, with a lower [trainer] lr, from the last checkpoint: it is whole, and these "
    "weights were not published"
)


@dataclass(slots=True)
class StepResult:
    """What a step did."""

    metrics: dict[str, float | None]
    scores: StepScores
    step_timer: StepTimer
    probe: ImageSwapProbe | None = None
    """Whether the model looks, where this step asked."""
    caches: dict[str, dict[str, float]] = field(default_factory=dict)
    """Hits, misses, evictions and bytes so far, summed over ranks; on rank 0."""

    @property
    def seconds(self) -> dict[str, float]:
        """Of its parts: forward, backward, optimizer."""
        return self.step_timer.seconds()


def compute_hidden(
    forward: Forward,
    ready: ReadyMicroBatch,
    family: Family,
    device: torch.device,
    kept: FrozenTowerFeatures | None = None,
) -> torch.Tensor:
    """The hidden states (S, H) that predict the trained tokens. Each image is encoded once, or
    comes from what is kept of a frozen tower."""
    batch = ready.batch
    token_ids = copy_to_device(batch.token_ids.numpy().astype(np.int64), device)[None]
    positions = copy_to_device(batch.positions.numpy().astype(np.int64), device)[:, None]
    features = places = encoded = None
    blank = None
    check_patches(batch, ready.patches)
    if kept is not None:
        encoded = kept.of(ready, device)
    elif ready.patches is not None:
        patches = copy_to_device(ready.patches, device)
        encoded = forward.encode(patches, [entry.item.grid for entry in batch.items])
    elif ready.shows:
        blank = encode_blank(forward, device)
    if encoded is not None:
        index, where = _locate_features(batch, family)
        check_features(batch, len(encoded), family)
        features = encoded[copy_to_device(index, device)]
        places = copy_to_device(where, device)
    dtype = next(forward.model.parameters()).dtype
    pattern = build_attention_pattern(batch.subtree_end.numpy(), device, dtype)
    hidden = forward.hidden(token_ids, positions, features, places, pattern)[0]
    if blank is not None:
        hidden = hidden + 0.0 * blank.to(hidden.dtype)
    predicting = batch.parent.numpy()[batch.trained.numpy()].astype(np.int64)
    return hidden[copy_to_device(predicting, device)]


def _locate_features(batch: MicroBatch, family: Family) -> tuple[np.ndarray, np.ndarray]:
    """For each visual token of the pack the row of its feature, and its place, ascending."""
    counts = [family.num_tokens(entry.item) for entry in batch.items]
    firsts = np.cumsum([0, *counts])
    slots = sorted(batch.slots, key=lambda slot: slot.offset)
    index = np.concatenate([firsts[s.item] + np.arange(s.length) for s in slots])
    where = np.concatenate([s.offset + np.arange(s.length) for s in slots])
    return index.astype(np.int64), where.astype(np.int64)


@dataclass
class Learner:
    """Holds the model, its optimizer and, where the loss wants one, a frozen reference."""

    forward: Forward
    reference: Forward | None
    loss: LossFunction
    """From tokens to their losses: `[trainer] loss`, or the supervised one."""
    optimizer: torch.optim.AdamW
    family: Family
    config: TrainerConfig
    steps: int
    pad_ids: tuple[int, ...]
    vocab_size: int
    device: torch.device
    ranks: RankInfo = field(default_factory=RankInfo)
    whole: ShardedModel | None = None
    """Around the sharded model; None where one rank holds all of it."""
    sharded_reference: ShardedModel | None = None
    features: FrozenTowerFeatures | None = None
    """Of the tower, where it is frozen."""
    reference_features: FrozenTowerFeatures | None = None
    pixels: PixelCacheStats | None = None
    """Of what makes this rank's pixels."""
    watchdog: StallWatchdog = field(default_factory=StallWatchdog)
    diagnostics_every: int = 0
    """Steps between two looks at whether the model looks; 0 is never."""
    banned: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.banned = torch.tensor(self.pad_ids, dtype=torch.long, device=self.device)

    def step(self, ready: ReadyBatch) -> StepResult:
        """Turns policy version step-1 into version step."""
        began = time.monotonic()
        metric_sums = MetricSums((*SUM_NAMES, "grad_norm"))
        scored: list[tuple[MicroBatch, torch.Tensor]] = []
        compiled = count_compiled_graphs() if self.config.compile_backend else 0
        self.optimizer.zero_grad(set_to_none=True)
        step_timer = StepTimer(self.device)
        for number, micro_batch in enumerate(ready.micro_batches, start=1):
            self.watchdog.mark(f"micro-batch {number} of step {ready.step}")
            check_micro_batch(micro_batch.batch, self.family, self.pad_ids, self.vocab_size)
            metric_sums.count("all_tokens", len(micro_batch.batch.token_ids))
            if len(micro_batch.batch.trained) or self.ranks.size > 1:
                logprobs = self._backward(micro_batch, ready.step, metric_sums, step_timer)
                scored.append((micro_batch.batch, logprobs))
        looked = self._probe(ready)
        if looked is not None:
            step_timer.end("probe")
        self.watchdog.mark(f"the update of step {ready.step}")
        metric_sums.add("grad_norm", self.update(ready.step))
        step_timer.end("optimizer")
        # The first time in the step that the host waits for the device. What diverged has spoilt
        # these weights, which end here: they are neither published nor kept.
        sums, said = metric_sums.read(), _to_host(scored)
        norm = sums.pop("grad_norm")
        if not math.isfinite(sums["loss"]):
            raise TrainingDiverged(f"step {ready.step}: the loss is {sums['loss']}", _DIVERGED_FIX)
        # One rank's loss spoils the norm of all: here the others wait to be told whose it was.
        metrics = self._metrics(ready, sum_over_ranks(sums, self.ranks.size))
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"step {ready.step}: the gradient's norm is {norm}", _DIVERGED_FIX
            )
        metrics["grad_norm"] = norm
        metrics["compilations"] = (
            count_compiled_graphs() - compiled if self.config.compile_backend else None
        )
        metrics["compute_s"] = time.monotonic() - began
        everyone = gather_to_lead((said, self._caches()), self.ranks)
        scores = _build_step_scores(ready.step, [one for rank, _ in everyone for one in rank])
        return StepResult(
            metrics,
            scores,
            step_timer,
            looked,
            _sum_cache_figures([caches for _, caches in everyone]),
        )

    def _caches(self) -> dict[str, dict[str, int]]:
        """Of this rank."""
        found = {} if self.pixels is None else {"trainer_pixels": self.pixels.figures()}
        if (kept := self.features or self.reference_features) is not None:
            found["trainer_features"] = kept.cache.figures()
        return found

    def _probe(self, ready: ReadyBatch) -> ImageSwapProbe | None:
        """Asks one micro-batch of the step, before the update; what it says comes to rank 0."""
        if not self.diagnostics_every or ready.step % self.diagnostics_every:
            return None
        own = pick_probe_micro_batch(ready.micro_batches)
        names = all_gather_list([] if own is None else [own[0]], self.ranks.size)
        if not names:
            return None
        self.watchdog.mark(f"the probe of step {ready.step}")
        found = None
        if own is not None and own[0] == min(names):
            found = probe(own[1], self.score)
        else:
            smallest = min(ready.micro_batches, key=lambda m: len(m.batch.token_ids))
            run_probe_passes(smallest, self.score)
        everyone = gather_to_lead(found, self.ranks)
        return next((one for one in everyone if one is not None), None)

    def score(self, ready: ReadyMicroBatch) -> np.ndarray:
        """The logprobs (S,) of the trained tokens; nothing is learnt."""
        with torch.no_grad():
            logprobs = self.call_gathered(self._logprobs, ready)
        if self.whole is not None:
            self.whole.reshard()  # without a backward pass nothing else does
        return logprobs.cpu().numpy()

    @torch.no_grad()
    def evaluate(self, ready: ReadyBatch) -> tuple[float, float]:
        """The summed -log pi of the trained tokens, and how many they are; nothing is learnt."""
        metric_sums = MetricSums(("nll", "tokens"))
        for number, micro_batch in enumerate(ready.micro_batches, start=1):
            self.watchdog.mark(f"micro-batch {number} of the evaluation after step {ready.step}")
            check_micro_batch(micro_batch.batch, self.family, self.pad_ids, self.vocab_size)
            if len(micro_batch.batch.trained) or self.ranks.size > 1:
                logprobs = self.call_gathered(self._logprobs, micro_batch)
                metric_sums.add("nll", -logprobs.double().sum())
                metric_sums.count("tokens", len(logprobs))
        if self.whole is not None:
            self.whole.reshard()  # without a backward pass nothing else does
        total = sum_over_ranks(metric_sums.read(), self.ranks.size)
        return total["nll"], total["tokens"]

    def _logprobs(self, ready: ReadyMicroBatch) -> torch.Tensor:
        batch = ready.batch
        hidden = compute_hidden(self.forward, ready, self.family, self.device, self.features)
        tokens = _to_device(batch.token_ids.numpy()[batch.trained.numpy()], self.device).long()
        return chosen_logprobs(self.forward, hidden, tokens, self.banned, batch.temperature)

    def _backward(
        self, ready: ReadyMicroBatch, step: int, metric_sums: MetricSums, step_timer: StepTimer
    ) -> torch.Tensor:
        total, chosen = self.call_gathered(self._loss_with_reference, ready, step, metric_sums)
        step_timer.end("forward")
        # Gradients are averaged over ranks, and the losses of a step are to be added.
        (total * self.ranks.size).backward()
        step_timer.end("backward")
        metric_sums.add("loss", total)
        return chosen

    def call_gathered(self, function: Callable[..., T], *args: Any) -> T:
        """Calls `function` with the parameters at hand, where they are sharded."""
        return _call_gathered(self.whole, function, *args)

    def _loss_with_reference(
        self, ready: ReadyMicroBatch, step: int, metric_sums: MetricSums
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, with the reference gathered once, however many tokens this rank trains.

        It comes back past the reference's own call: what that returns, FSDP would gather the
        reference for again in the backward pass.
        """
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        _call_gathered(
            self.sharded_reference, lambda: found.append(self._loss(ready, step, metric_sums))
        )
        return found[0]

    def _loss(
        self, ready: ReadyMicroBatch, step: int, metric_sums: MetricSums
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = ready.batch
        hidden = compute_hidden(self.forward, ready, self.family, self.device, self.features)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                kept = self.reference_features
                reference = compute_hidden(self.reference, ready, self.family, self.device, kept)
        tokens = _to_device(batch.token_ids.numpy()[batch.trained.numpy()], self.device).long()
        old = _to_device(batch.logprobs.numpy(), self.device)
        advantages = _to_device(batch.advantages.numpy(), self.device)
        weight = _to_device(batch.loss_weight.numpy(), self.device)
        own = batch.versions.numpy() == step - 1
        scorer = TokenScorer(
            self.forward,
            self.reference,
            self.banned,
            batch.temperature,
            self.config.measure_entropy,
            backend=self.config.compile_backend,
        )
        scored = scorer.score(hidden, tokens, reference)
        logprobs = scored.logprobs
        _measure_tokens(metric_sums, scored, old, own)
        inputs = LossInputs(logprobs, old, advantages, _number_sequences(batch, self.device))
        token_loss, clipped = self.loss(inputs)
        metric_sums.add("clipped", clipped.sum())
        if scored.kl is not None:
            token_loss = token_loss + self.config.kl_coef * scored.kl
            metric_sums.add("kl_ref", scored.kl.detach().sum())
        total = (token_loss * weight).sum()
        if self.ranks.size > 1:
            # Also where nothing trains: every parameter needs a gradient on every rank.
            total = total + self.forward.logits(hidden[:0]).float().sum()
        return total, logprobs.detach()

    def update(self, step: int) -> torch.Tensor:
        """Clips and applies the gradients; their norm before clipping, still on the device."""
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        parameters = [p for p in held if p.grad is not None]
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        set_learning_rate(self.optimizer, lr_scale(self.config, step, self.steps))
        self.optimizer.step()
        return norm

    def _metrics(self, ready: ReadyBatch, sums: dict[str, float]) -> dict[str, float | None]:
        num = max(sums["tokens"], 1.0)
        fresh, older = sums["fresh_tokens"], sums["older_tokens"]
        packed = [m.batch for m in ready.micro_batches]
        return {
            "loss": sums["loss"],
            "entropy": sums["entropy"] / num if self.config.measure_entropy else None,
            "clip_fraction": sums["clipped"] / num,
            "kl_ref": sums["kl_ref"] / num if self.reference is not None else None,
            # Null, not 0, when no token was sampled by the version that the trainer holds.
            "mismatch_kl": sums["fresh_kl"] / fresh if fresh else None,
            "fresh_tokens": fresh,
            "lag_kl": sums["older_kl"] / older if older else None,
            "lr": self.config.lr * lr_scale(self.config, ready.step, self.steps),
            "trained_tokens": sums["tokens"],
            "tokens": sums["all_tokens"],
            "micro_batches": float(len(packed) * self.ranks.size),
            "samples": float(ready.num_samples),
            "images": float(ready.num_slots),
            "distinct_images": float(ready.num_images),
        }


def _call_gathered(whole: ShardedModel | None, function: Callable[..., T], *args: Any) -> T:
    # Nothing as an argument: FSDP on a GPU hands on copies, and sums are to come back.
    result: T = function(*args) if whole is None else whole(lambda: function(*args))
    return result


def _measure_tokens(
    metric_sums: MetricSums, scored: TokenScores, old: torch.Tensor, own: np.ndarray
) -> None:
    """`own` says which tokens the version that is trained sampled itself."""
    with torch.no_grad():
        kl = mismatch_kl(scored.logprobs, old)
        metric_sums.count("tokens", len(kl))
        if scored.entropy is not None:
            metric_sums.add("entropy", scored.entropy.sum())
        for name, chosen in (("fresh", own), ("older", ~own)):
            metric_sums.count(f"{name}_tokens", int(chosen.sum()))
            # By places that the host knows: a mask on the device would have to be counted first.
            metric_sums.add(f"{name}_kl", kl[_to_device(np.flatnonzero(chosen), kl.device)].sum())


def _number_sequences(batch: MicroBatch, device: torch.device) -> torch.Tensor:
    """For each trained token the number of the model call that it was sampled in."""
    lengths = [origin.stop - origin.start for origin in batch.origins]
    return copy_to_device(np.repeat(np.arange(len(lengths)), lengths), device)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return copy_to_device(array.copy(), device)


def _to_host(
    scored: list[tuple[MicroBatch, torch.Tensor]],
) -> list[tuple[MicroBatch, np.ndarray]]:
    """In one copy from the device."""
    if not scored:
        return []
    whole = torch.cat([logprobs for _, logprobs in scored]).cpu().numpy()
    ends = np.cumsum([len(logprobs) for _, logprobs in scored])
    parts = np.split(whole, ends[:-1])
    return [(batch, part) for (batch, _), part in zip(scored, parts, strict=True)]


def _sum_cache_figures(ranks: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """The figures of each cache over all ranks, which have the same caches."""
    return {
        name: {figure: sum(rank[name][figure] for rank in ranks) for figure in first}
        for name, first in (ranks[0] if ranks else {}).items()
    }


def _build_step_scores(step: int, scored: list[tuple[MicroBatch, np.ndarray]]) -> StepScores:
    origins: list[TokenOrigin] = []
    at = 0
    for batch, logprobs in scored:
        for o in batch.origins:
            start, stop = o.start + at, o.stop + at
            origins.append(TokenOrigin(start, stop, node=o.node, trace_id=o.trace_id))
        at += len(logprobs)
    trainer = np.concatenate([lp for _, lp in scored]) if scored else np.zeros(0)
    sampler = [batch.logprobs.numpy() for batch, _ in scored]
    advantages = [batch.advantages.numpy() for batch, _ in scored]
    empty = np.zeros(0, dtype=np.float32)
    return StepScores(
        step=step,
        origins=origins,
        logprobs=Array.of(trainer, "float32"),
        ratios=Array.of(np.exp(trainer - np.concatenate(sampler or [empty])), "float32"),
        advantages=Array.of(np.concatenate(advantages or [empty]), "float32"),
    )
