"""One optimizer step: forward, loss and backward over micro-batches, then the update."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sightline.algo.losses import LossFunction, LossInputs, mismatch_kl
from sightline.compute.logprobs import Temperature, chosen_logprobs
from sightline.config import TrainerConfig
from sightline.errors import ProcessFailed, TrainingDiverged
from sightline.families import Family, Forward
from sightline.families.device_copy import copy_to_device
from sightline.pixels import PixelCacheStats
from sightline.trainer.alignment_checks import check_micro_batch
from sightline.trainer.blocks import count_compiled_graphs
from sightline.trainer.feed import ReadyBatch, ReadyMicroBatch
from sightline.trainer.forward_pass import FrozenTowerFeatures, compute_hidden
from sightline.trainer.optimizer import lr_scale, set_learning_rate
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.probe import NUM_PASSES, ImageSwapProbe, pick_probe_micro_batch, probe
from sightline.trainer.shard import (
    ShardedModel,
    call_gathered,
    full_tensor,
    release_gathered,
    set_gradient_sync,
)
from sightline.trainer.step_result import (
    MetricSums,
    StepResult,
    StepTimer,
    build_step_scores,
    check_same_bits,
    copy_to_host,
    sum_cache_figures,
)
from sightline.trainer.token_scores import TokenScorer, TokenScores
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire.micro_batch import MicroBatch

SUM_NAMES = (
    "all_tokens", "clipped", "entropy", "fresh_kl", "fresh_tokens", "kl_ref", "loss", "older_kl",
    "older_tokens", "tokens",
)  # fmt: skip


@dataclass
class Learner:
    """Holds the model, its optimizer and, where a KL term is wanted, a frozen reference."""

    forward: Forward
    reference: Forward | None
    loss: LossFunction
    """From trained tokens to their losses: `[trainer] loss`, or the supervised loss."""
    optimizer: torch.optim.AdamW
    family: Family
    config: TrainerConfig
    steps: int
    pad_ids: tuple[int, ...]
    vocab_size: int
    device: torch.device
    dims: ParallelDims = field(default_factory=ParallelDims)
    sharded: ShardedModel | None = None
    """Gathers the model's parameters around a call; None where one rank holds all of them."""
    sharded_reference: ShardedModel | None = None
    """Gathers the reference's parameters around a call; None where they are not sharded."""
    features: FrozenTowerFeatures | None = None
    """Features of a frozen vision tower; None where the tower trains."""
    reference_features: FrozenTowerFeatures | None = None
    """Features of the reference's vision tower; None where there is no reference."""
    pixels: PixelCacheStats | None = None
    """Counts of the cache that makes this rank's pixels."""
    watchdog: StallWatchdog = field(default_factory=StallWatchdog)
    diagnostics_every: int = 0
    """Steps between two measurements of whether the model uses its images; 0 is never."""
    exact: bool = False
    """Whether logprobs have the bits of the sampler's (`[model] exact`)."""
    replayed: range = range(0)
    """Steps whose batches a version may have sampled that was made again with other bits."""
    banned: Int[Tensor, " ids"] = field(init=False)
    """Token ids that no logprob is given to."""

    def __post_init__(self) -> None:
        self.banned = torch.tensor(self.pad_ids, dtype=torch.long, device=self.device)

    def step(self, ready: ReadyBatch) -> StepResult:
        """Turns policy version step-1 into version step.

            each micro-batch: checks, forward, loss (`_loss`), backward     gradients add up
            all of them:      clip, optimizer                               (`update`)

        The host waits for the device once, when all of it has been asked for; it waits for other
        ranks in the collectives of a sharded model, and for their sums and scores at the end.
        """
        began = time.monotonic()
        metric_sums = MetricSums((*SUM_NAMES, "grad_norm"))
        scored: list[tuple[MicroBatch, Tensor]] = []
        compiled = count_compiled_graphs() if self.config.compile_backend else 0
        self.optimizer.zero_grad(set_to_none=True)
        step_timer = StepTimer(self.device)
        last = self._find_last_trained(ready)
        self.watchdog.enter(f"the first pixels of step {ready.step}")
        for number, micro_batch in ready.iterate_with_pixels():
            self.watchdog.enter(f"micro-batch {number} of step {ready.step}")
            check_micro_batch(micro_batch.batch, self.family, self.pad_ids, self.vocab_size)
            metric_sums.count("all_tokens", len(micro_batch.batch.token_ids))
            if len(micro_batch.batch.trained) or self.dims.is_distributed:
                set_gradient_sync(self.sharded, self.dims.is_distributed or number == last)
                try:
                    logprobs = self.backward(micro_batch, ready.step, metric_sums, step_timer)
                except torch.OutOfMemoryError as error:
                    raise self._build_memory_error(micro_batch.batch, ready.step, error) from error
                scored.append((micro_batch.batch, logprobs))
            del micro_batch  # and its pixels, before others are made
        found = self._probe(ready)
        if found is not None:
            step_timer.end("probe")
        self.watchdog.enter(f"the update of step {ready.step}")
        metric_sums.add("grad_norm", self.update(ready.step))
        step_timer.end("optimizer")
        # The first time in the step that the host waits for the device.
        sums, logprobs_of = metric_sums.read(), copy_to_host(scored)
        if self.exact and ready.step not in self.replayed:
            check_same_bits(ready.step, logprobs_of)
        metrics = self._check_finite(ready, sums)
        metrics["compilations"] = (
            count_compiled_graphs() - compiled if self.config.compile_backend else None
        )
        metrics["compute_s"] = time.monotonic() - began
        everyone = self.dims.gather_to_lead((logprobs_of, self._cache_figures()))
        return StepResult(
            metrics,
            build_step_scores(ready.step, [one for rank, _ in everyone for one in rank]),
            step_timer,
            found,
            sum_cache_figures([caches for _, caches in everyone]),
        )

    def _find_last_trained(self, ready: ReadyBatch) -> int:
        """The number, from 1, of the last micro-batch that trains; 0 where none does."""
        found = (n for n, one in enumerate(ready.micro_batches, 1) if len(one.batch.trained))
        return max(found, default=0)

    def _build_memory_error(
        self, batch: MicroBatch, step: int, error: torch.OutOfMemoryError
    ) -> ProcessFailed:
        fixes = ["lower [trainer] micro_batch_tokens"]
        if not self.config.activation_checkpointing:
            fixes.insert(0, "set [trainer] activation_checkpointing = true")
        fixes.append("leave the trainer more of the GPU ([inference] gpu_memory_utilization)")
        return ProcessFailed(
            f"step {step}: no memory of {self.device} is left for a micro-batch of "
            f"{len(batch.token_ids)} tokens and {batch.num_patches} patches of images "
            f"({str(error).partition('. ')[0]})",
            ", or ".join(fixes),
        )

    def _check_finite(self, ready: ReadyBatch, sums: dict[str, float]) -> dict[str, float | None]:
        """The step's metrics over all ranks; raises where loss or gradient diverged.

        What diverged has spoilt these weights, which end here: they are neither published nor kept.
        """
        norm = sums.pop("grad_norm")
        problem = f"the loss is {sums['loss']}" if not math.isfinite(sums["loss"]) else ""
        if not problem:
            # One rank's loss spoils the norm of all: here the others wait to be told whose it was.
            metrics = self._metrics(ready, self.dims.sum(sums))
            if math.isfinite(norm):
                return metrics | {"grad_norm": norm}
            problem = f"the gradient's norm is {norm}"
        raise TrainingDiverged(
            f"step {ready.step}: {problem}",
            "start a new run, with a lower [trainer] lr, from the last checkpoint: it is intact, "
            "and these weights were not published",
        )

    def _cache_figures(self) -> dict[str, dict[str, int]]:
        """Hits, misses, evictions and bytes of this rank's caches, by cache."""
        found = {} if self.pixels is None else {"trainer_pixels": self.pixels.figures()}
        if (frozen := self.features or self.reference_features) is not None:
            found["trainer_features"] = frozen.cache.figures()
        return found

    def _probe(self, ready: ReadyBatch) -> ImageSwapProbe | None:
        """Probes one micro-batch of the step, before the update; the result comes to rank 0."""
        if not self.diagnostics_every or ready.step % self.diagnostics_every:
            return None
        own = pick_probe_micro_batch(ready.micro_batches)
        names = self.dims.gather_list([] if own is None else [own[0]])
        if not names:
            return None
        self.watchdog.enter(f"the probe of step {ready.step}")
        found = None
        if own is not None and own[0] == min(names):
            with own[1].hold_pixels() as micro_batch:
                found = probe(micro_batch, self.score)
        else:
            smallest = min(ready.micro_batches, key=lambda m: len(m.batch.token_ids))
            with smallest.hold_pixels() as micro_batch:
                for _ in range(NUM_PASSES):  # tower included, beside the rank that probes
                    self.score(replace(micro_batch, runs_tower=True))
        return next(filter(None, self.dims.gather_to_lead(found)), None)

    def score(self, ready: ReadyMicroBatch) -> Float[np.ndarray, " tokens"]:
        """The logprobs of the trained tokens; nothing is learnt."""
        return self._forward_only(ready).cpu().numpy()

    def evaluate(self, ready: ReadyBatch) -> tuple[float, float]:
        """The summed -log pi of the trained tokens, and how many they are; nothing is learnt."""
        metric_sums = MetricSums(("nll", "tokens"))
        self.watchdog.enter(f"the first pixels of the evaluation after step {ready.step}")
        for number, micro_batch in ready.iterate_with_pixels():
            self.watchdog.enter(f"micro-batch {number} of the evaluation after step {ready.step}")
            check_micro_batch(micro_batch.batch, self.family, self.pad_ids, self.vocab_size)
            if len(micro_batch.batch.trained) or self.dims.is_distributed:
                logprobs = self._forward_only(micro_batch)
                metric_sums.add("nll", -logprobs.double().sum())
                metric_sums.count("tokens", len(logprobs))
            del micro_batch
        total = self.dims.sum(metric_sums.read())
        return total["nll"], total["tokens"]

    @torch.no_grad()
    def _forward_only(self, ready: ReadyMicroBatch) -> Float[Tensor, " tokens"]:
        def compute() -> Tensor:
            hidden = self._hidden(ready)
            tokens, temperature = self._trained_ids(ready.batch), self._temperature(ready.batch)
            return chosen_logprobs(self.forward, hidden, tokens, self.banned, temperature)

        logprobs = call_gathered(self.sharded, compute)
        release_gathered(self.sharded)
        return logprobs

    def backward(
        self, ready: ReadyMicroBatch, step: int, metric_sums: MetricSums, step_timer: StepTimer
    ) -> Float[Tensor, " tokens"]:
        """Adds the gradient of a micro-batch; the logprobs of its trained tokens."""
        total, logprobs = call_gathered(
            self.sharded, lambda: self._loss_with_reference(ready, step, metric_sums)
        )
        step_timer.end("forward")
        self.dims.scale_loss(total).backward()
        step_timer.end("backward")
        metric_sums.add("loss", total)
        return logprobs

    def _loss_with_reference(
        self, ready: ReadyMicroBatch, step: int, metric_sums: MetricSums
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " tokens"]]:
        """The loss, with the reference gathered once, however many tokens this rank trains.

        It comes back past the reference's own call: what that returns, FSDP would gather the
        reference for again in the backward pass.
        """
        found: list[tuple[Tensor, Tensor]] = []
        call_gathered(
            self.sharded_reference, lambda: found.append(self._loss(ready, step, metric_sums))
        )
        return found[0]

    def _loss(
        self, ready: ReadyMicroBatch, step: int, metric_sums: MetricSums
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " tokens"]]:
        """Where a micro-batch becomes a loss; and the logprobs of its trained tokens."""
        batch, config = ready.batch, self.config
        hidden = self._hidden(ready)
        reference_hidden = None
        if self.reference is not None:
            with torch.no_grad():
                reference_hidden = compute_hidden(
                    self.reference, ready, self.family, self.device, self.reference_features
                )
        scorer = TokenScorer(
            self.forward,
            self.reference,
            self.banned,
            self._temperature(batch),
            config.measure_entropy,
            backend="" if self.exact else config.compile_backend,
        )
        scores = scorer.score(hidden, self._trained_ids(batch), reference_hidden)
        sampler_logprobs, advantages, loss_weight = (
            copy_to_device(array.numpy().copy(), self.device)
            for array in (batch.logprobs, batch.advantages, batch.loss_weight)
        )
        measure_tokens(metric_sums, scores, sampler_logprobs, batch.versions.numpy() == step - 1)
        # For each trained token the number of the model call that it was sampled in.
        lengths = [origin.stop - origin.start for origin in batch.origins]
        sequence_ids = copy_to_device(np.repeat(np.arange(len(lengths)), lengths), self.device)
        token_loss, clipped = self.loss(
            LossInputs(scores.logprobs, sampler_logprobs, advantages, sequence_ids)
        )
        metric_sums.add("clipped", clipped.sum())
        if scores.kl is not None:
            token_loss = token_loss + config.kl_coef * scores.kl
            metric_sums.add("kl_ref", scores.kl.detach().sum())
        total = (token_loss * loss_weight).sum()
        if self.dims.is_distributed:
            # Also where nothing trains: every parameter needs a gradient on every rank.
            total = total + self.forward.logits(hidden[:0]).float().sum()
        return total, scores.logprobs.detach()

    def _hidden(self, ready: ReadyMicroBatch) -> Float[Tensor, "trained hidden"]:
        return compute_hidden(
            self.forward, ready, self.family, self.device, self.features, self.exact
        )

    def _temperature(self, batch: MicroBatch) -> Temperature:
        if not self.exact:
            return batch.temperature
        return torch.full((1, 1), batch.temperature, device=self.device)

    def _trained_ids(self, batch: MicroBatch) -> Int[Tensor, " tokens"]:
        ids = batch.token_ids.numpy()[batch.trained.numpy()].astype(np.int64)
        return copy_to_device(ids, self.device)

    def update(self, step: int) -> Float[Tensor, ""]:
        """Clips and applies the gradients; their norm before clipping, still on the device."""
        release_gathered(self.sharded)
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        parameters = [p for p in trained if p.grad is not None]
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        set_learning_rate(self.optimizer, lr_scale(self.config, step, self.steps))
        self.optimizer.step()
        return norm

    def _metrics(self, ready: ReadyBatch, sums: dict[str, float]) -> dict[str, float | None]:
        num = max(sums["tokens"], 1.0)
        fresh, older = sums["fresh_tokens"], sums["older_tokens"]
        groups = self.optimizer.param_groups  # two of text, and two of a vision tower that trains
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
            "vision_lr": groups[2]["lr"] if len(groups) > 2 else None,
            "trained_tokens": sums["tokens"],
            "tokens": sums["all_tokens"],
            "micro_batches": float(len(ready.micro_batches) * self.dims.data),
            "samples": float(ready.num_samples),
            "images": float(ready.num_slots),
            "distinct_images": float(ready.num_items),
            "bad_media": float(len(ready.dropped)),
        }


def measure_tokens(
    metric_sums: MetricSums,
    scores: TokenScores,
    sampler_logprobs: Float[Tensor, " tokens"],
    is_fresh: Bool[np.ndarray, " tokens"],
) -> None:
    """Sums entropy and mismatch; `is_fresh` marks tokens sampled by the version in training."""
    with torch.no_grad():
        kl = mismatch_kl(scores.logprobs, sampler_logprobs)
        metric_sums.count("tokens", len(kl))
        if scores.entropy is not None:
            metric_sums.add("entropy", scores.entropy.sum())
        for name, chosen in (("fresh", is_fresh), ("older", ~is_fresh)):
            metric_sums.count(f"{name}_tokens", int(chosen.sum()))
            # By places that the host knows: a mask on the device would have to be counted first.
            places = copy_to_device(np.flatnonzero(chosen), kl.device)
            metric_sums.add(f"{name}_kl", kl[places].sum())
