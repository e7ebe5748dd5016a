"""One step of training: forward, loss and backward over micro-batches, then the updates."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sightline.errors import ProcessFailed, TrainingDiverged
from sightline.pack import split_micro_batch
from sightline.pixels.materialize import PixelCacheStats
from sightline.trainer.alignment_checks import check_micro_batch
from sightline.trainer.batch_loss import (
    LossComputer,
    MicroBatchLoss,
    PriorScores,
    build_advantage_table,
    set_advantages,
    to_host,
)
from sightline.trainer.blocks import count_compiled_graphs
from sightline.trainer.feed import ReadyBatch, ReadyMicroBatch
from sightline.trainer.optimizer import MasterAdamW, clip_gradients, lr_scale, set_learning_rate
from sightline.trainer.probe import NUM_PASSES, ImageSwapProbe, pick_probe_micro_batch, probe
from sightline.trainer.shard import call_gathered
from sightline.trainer.step_result import (
    MetricSums,
    StepResult,
    StepTimer,
    build_step_scores,
    check_same_bits,
    copy_to_host,
    sum_cache_figures,
    sum_mismatch,
)
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire.micro_batch import MicroBatch

SUM_NAMES = ("all_tokens", "loss", "differing_routes", "routes", "oom_splits")
METRIC, COUNT = "algorithm ", "tokens with "
"""Prefixes among the sums: of an algorithm's own metric, and of the tokens that have it."""


class _MicroBatchTooLarge(Exception):
    def __init__(self, place: int, failure: ProcessFailed) -> None:
        super().__init__(place)
        self.place, self.failure = place, failure


@dataclass(kw_only=True)
class Learner(LossComputer):
    """Computes training steps."""

    optimizer: MasterAdamW
    steps: int
    vocab_size: int
    seed: int = 0
    """Seed of the order of minibatches, together with step and epoch."""
    pixels: PixelCacheStats | None = None
    """Statistics of this rank's pixel cache."""
    watchdog: StallWatchdog = field(default_factory=StallWatchdog)
    diagnostics_every: int = 0
    """Steps between probes of whether the model uses its images; 0 for never."""
    num_splits: int = 0
    """Number of passes so far that an out-of-memory error split in two."""
    replayed: range = range(0)
    """Steps whose batches may come from a version that a replay computed with different bits."""
    timer: StepTimer = field(init=False)
    """Measures the parts of the current step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.timer = StepTimer(self.device)

    def step(self, ready: ReadyBatch) -> StepResult:
        """Turn policy version step-1 into version step.

            once:             logprobs, values, advantages, if needed       (`_score_first`)
            each micro-batch: checks, forward, loss, backward               (`backward`)
            each minibatch:   clip, optimizer                               (`update`)

        With one epoch and one minibatch, the host waits for the device once, at the end. It waits
        for other ranks in the collectives of a sharded model, and for their sums and scores.
        """
        began, num_splits = time.monotonic(), self.num_splits
        metric_sums = MetricSums((*SUM_NAMES, "grad_norm"))
        compiled = count_compiled_graphs() if self.config.compile_backend else 0
        self.timer = StepTimer(self.device)
        ready, prior = self._score_first(ready)
        scored = [(ready.micro_batches[at].batch, p.logprobs) for at, p in enumerate(prior)]
        probed, num_updates = None, 0
        for epoch in range(self.algorithm.settings.epochs):
            for minibatch in self._order_minibatches(ready, epoch):
                self.optimizer.zero_grad(set_to_none=True)
                trained = self._train(ready, minibatch, prior, epoch, metric_sums)
                if num_updates == 0:
                    scored = scored or trained
                    if (probed := self._probe(ready)) is not None:
                        self.timer.end("probe")
                self.watchdog.enter(f"the update of step {ready.step}")
                metric_sums.add("grad_norm", self.update(ready.step))
                self.timer.end("optimizer")
                num_updates += 1
        metric_sums.count("oom_splits", self.num_splits - num_splits)
        sums, logprobs_of = metric_sums.read(), copy_to_host(scored)
        sums |= sum_mismatch(ready.step, logprobs_of)
        if self.exact and ready.step not in self.replayed:
            check_same_bits(ready.step, logprobs_of)
        metrics = self._check_finite(ready, sums, num_updates)
        metrics["compilations"] = (
            count_compiled_graphs() - compiled if self.config.compile_backend else None
        )
        metrics["compute_s"] = time.monotonic() - began
        everyone = self.dims.gather_to_lead((logprobs_of, self._cache_figures()))
        return StepResult(
            metrics,
            build_step_scores(ready.step, [one for rank, _ in everyone for one in rank]),
            self.timer,
            probed,
            sum_cache_figures([caches for _, caches in everyone]),
        )

    def _train(
        self,
        ready: ReadyBatch,
        minibatch: range,
        prior: list[PriorScores],
        epoch: int,
        metric_sums: MetricSums,
    ) -> list[tuple[MicroBatch, Tensor]]:
        """Add up a minibatch's gradients. Return its micro-batches with their logprobs.

        After an out-of-memory error, the minibatch starts again without gradients, and the
        micro-batch that did not fit is split. Other ranks would wait in collectives, so only a
        single rank can do this.
        """
        halved: set[int] = set()
        while True:
            try:
                trained, sums = self._accumulate(ready, minibatch, prior, epoch, halved)
            except _MicroBatchTooLarge as error:
                place, failure, cause = error.place, error.failure, error.__cause__
                if (
                    place in halved
                    or self.dims.is_distributed
                    or not split_micro_batch(ready.micro_batches[place].batch)
                ):
                    raise failure from cause
                del cause  # its frames hold the activations
            else:
                metric_sums.merge(sums)
                self.num_splits += len(halved)
                return trained
            halved.add(place)
            self.optimizer.zero_grad(set_to_none=True)  # of the failed pass
            self._free_memory()

    def score_only(self, ready: ReadyMicroBatch, is_part: bool = False) -> PriorScores:
        """Score the trained tokens, in two parts after an out-of-memory error (see `_train`)."""
        try:
            return super().score_only(ready)
        except torch.OutOfMemoryError as error:
            failure = self._build_memory_error(ready.batch, error)
            parts = [] if is_part or self.dims.is_distributed else ready.split()
            if not parts:
                raise failure from error
        self._free_memory()  # after the handler: the error's frames hold the activations
        self.num_splits += 1
        return PriorScores.join(
            [(self.score_only(part, True), trains) for part, trains in parts if trains.any()]
        )

    def _free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _accumulate(
        self,
        ready: ReadyBatch,
        places: range,
        prior: list[PriorScores],
        epoch: int,
        halved: Set[int],
    ) -> tuple[list[tuple[MicroBatch, Tensor]], MetricSums]:
        """Add up the gradients at `places`, with the micro-batches at `halved` in two parts."""
        trained: list[tuple[MicroBatch, Tensor]] = []
        metric_sums = MetricSums(())
        for place, micro_batch in self._iterate(ready, f"step {ready.step}", places):
            parts = [(micro_batch, prior[place] if prior else None)]
            if place in halved:
                parts = [
                    (part, scores and scores.take(np.flatnonzero(trains)))
                    for whole, scores in parts
                    for part, trains in whole.split()
                    if trains.any()
                ]
            for part, scores in parts:
                if epoch == 0:
                    metric_sums.count("all_tokens", len(part.batch.token_ids))
                if len(part.batch.trained) or self.dims.is_distributed:
                    try:
                        loss = self.backward(part, metric_sums, scores)
                    except torch.OutOfMemoryError as error:
                        failure = self._build_memory_error(part.batch, error)
                        raise _MicroBatchTooLarge(place, failure) from error
                    trained.append((part.batch, loss.logprobs))
            del micro_batch, part, parts  # frees its pixels before the next ones are made
        return trained, metric_sums

    def _iterate(
        self, ready: ReadyBatch, activity: str, places: range | None = None
    ) -> Iterator[tuple[int, ReadyMicroBatch]]:
        """Yield checked micro-batches with their places and pixels. See `iterate_with_pixels`."""
        self.watchdog.enter(f"the first pixels of {activity}")
        for place, micro_batch in ready.iterate_with_pixels(places):
            self.watchdog.enter(f"micro-batch {place + 1} of {activity}")
            check_micro_batch(micro_batch.batch, self.family, self.pad_ids, self.vocab_size)
            yield place, micro_batch
            del micro_batch

    def _order_minibatches(self, ready: ReadyBatch, epoch: int) -> list[range]:
        """Return the minibatches in the order of `epoch`, the same on every rank and replay."""
        minibatches = ready.minibatches
        if len(minibatches) == 1:
            return minibatches
        draws = np.random.default_rng([self.seed % (1 << 32), ready.step, epoch])
        return [minibatches[place] for place in draws.permutation(len(minibatches))]

    def _score_first(self, ready: ReadyBatch) -> tuple[ReadyBatch, list[PriorScores]]:
        """Score all micro-batches before the first update, if anything depends on it.

        After the first minibatch, the weights no longer match those that the sampler used. A
        correction needs the logprobs from before it also in later epochs.
        Advantages that depend on values or a teacher are computed here, on rank 0.
        """
        needs = self.algorithm.needs
        is_scored = needs.values or needs.teacher_logprobs
        is_old = needs.old_logprobs and self.algorithm.settings.epochs > 1
        if len(ready.minibatches) == 1 and not (is_scored or is_old):
            return ready, []
        prior = []
        for _, micro_batch in self._iterate(ready, f"the scores of step {ready.step}"):
            prior.append(self.score_only(micro_batch))
            del micro_batch
        self.timer.end("forward")
        if not is_scored:
            return ready, prior
        host_scores = [
            (m.batch.origins, to_host(p)) for m, p in zip(ready.micro_batches, prior, strict=True)
        ]
        everyone = [scores for rank in self.dims.gather_to_lead(host_scores) for scores in rank]
        table = None
        if ready.rollouts is not None:
            table = build_advantage_table(self.algorithm, ready.rollouts, everyone)
        table = self.dims.broadcast_from_lead(table)
        if table is None:  # the batch has stored advantages
            return ready, prior
        micro_batches = [set_advantages(micro_batch, table) for micro_batch in ready.micro_batches]
        return replace(ready, micro_batches=micro_batches), prior

    def _build_memory_error(
        self, batch: MicroBatch, error: torch.OutOfMemoryError
    ) -> ProcessFailed:
        num_rollouts = len({origin.trace_id for origin in batch.origins})
        shorter = "micro_batch_tokens" if num_rollouts > 1 else "max_sequence_tokens"
        fixes = [f"lower [trainer] {shorter}"]
        if not self.config.activation_checkpointing:
            fixes.insert(0, "set [trainer] activation_checkpointing = true")
        fixes.append("leave the trainer more of the GPU ([inference] gpu_memory_utilization)")
        return ProcessFailed(
            f"step {batch.step}: no memory of {self.device} is left for a micro-batch of "
            f"{len(batch.token_ids)} tokens and {batch.num_patches} patches of images, with "
            f"{num_rollouts} {'rollouts' if num_rollouts > 1 else 'rollout'} "
            f"({str(error).partition('. ')[0]})",
            ", or ".join(fixes),
        )

    def _check_finite(
        self, ready: ReadyBatch, sums: dict[str, float], num_updates: int
    ) -> dict[str, float | None]:
        """Return the step's metrics over all ranks. Raise if the loss or a gradient diverged.

        Diverged weights are neither published nor saved.
        """
        norm = sums.pop("grad_norm") / max(num_updates, 1)
        problem = f"the loss is {sums['loss']}" if not math.isfinite(sums["loss"]) else ""
        if not problem:
            # One rank's bad loss makes every rank's norm bad. The others wait here for its error.
            metrics = self._metrics(ready, self.dims.sum(sums), num_updates)
            if math.isfinite(norm):
                return metrics | {"grad_norm": norm}
            problem = f"the gradient's norm is {norm}"
        raise TrainingDiverged(
            f"step {ready.step}: {problem}",
            "start a new run, with a lower [trainer] lr, from the last checkpoint: it is intact, "
            "and these weights were not published",
        )

    def _cache_figures(self) -> dict[str, dict[str, int]]:
        """Return the hits, misses, evictions and bytes of each of this rank's caches."""
        figures = {} if self.pixels is None else {"trainer_pixels": self.pixels.figures()}
        features = self.features or getattr(self.reference, "features", None)
        if features is not None:
            figures["trainer_features"] = features.cache.figures()
        return figures

    def _probe(self, ready: ReadyBatch) -> ImageSwapProbe | None:
        """Probe one micro-batch of the step before the update. Rank 0 returns the result."""
        if not self.diagnostics_every or ready.step % self.diagnostics_every:
            return None
        candidate = pick_probe_micro_batch(ready.micro_batches)
        names = self.dims.gather_list([] if candidate is None else [candidate[0]])
        if not names:
            return None
        self.watchdog.enter(f"the probe of step {ready.step}")
        result = None
        is_probed = candidate is not None and candidate[0] == min(names)
        smallest = min(ready.micro_batches, key=lambda m: len(m.batch.token_ids))
        chosen = candidate[1] if candidate is not None and is_probed else smallest
        for _, micro_batch in replace(ready, micro_batches=[chosen]).iterate_with_pixels():
            if is_probed:
                result = probe(micro_batch, self.score)
            else:
                for _ in range(NUM_PASSES):  # with the tower, like the rank that probes
                    self.score(replace(micro_batch, runs_tower=True))
        return next(filter(None, self.dims.gather_to_lead(result)), None)

    def score(self, ready: ReadyMicroBatch) -> Float[np.ndarray, " tokens"]:
        """Return the logprobs of the trained tokens, without training."""
        return self.score_only(ready).logprobs.cpu().numpy()

    def evaluate(self, ready: ReadyBatch) -> tuple[float, float]:
        """Return the sum of -log pi over the trained tokens, and their number, without training."""
        metric_sums = MetricSums(("nll", "tokens"))
        for _, micro_batch in self._iterate(ready, f"the evaluation after step {ready.step}"):
            if len(micro_batch.batch.trained) or self.dims.is_distributed:
                logprobs = self.score_only(micro_batch).logprobs
                metric_sums.add("nll", -logprobs.double().sum())
                metric_sums.count("tokens", len(logprobs))
            del micro_batch
        total = self.dims.sum(metric_sums.read())
        return total["nll"], total["tokens"]

    def backward(
        self, ready: ReadyMicroBatch, metric_sums: MetricSums, prior: PriorScores | None = None
    ) -> MicroBatchLoss:
        """Accumulate a micro-batch's gradient, and add its loss and metrics to the sums."""
        frozen = None if self.reference is None else self.reference.sharded

        def compute() -> tuple[Tensor, MicroBatchLoss]:
            # FSDP gathers parameters again for the backward pass of the tensors that a call
            # returns. It finds none in a dataclass: the frozen reference is gathered once.
            loss = call_gathered(frozen, lambda: self.compute_loss(ready, prior))
            return loss.total, loss

        total, loss = call_gathered(self.sharded, compute)
        self.timer.end("forward")
        # FSDP averages gradients over ranks, and we need their sum. All `tensor` ranks of a group
        # have the whole loss.
        (total * (self.dims.size // self.dims.tensor)).backward()
        self.timer.end("backward")
        metric_sums.add("loss", total)
        if loss.routes is not None:
            metric_sums.add("differing_routes", loss.routes[0])
            metric_sums.add("routes", loss.routes[1])
        for name, numbers in loss.metrics.items():
            metric_sums.add(METRIC + name, numbers.detach().nansum())
            metric_sums.add(COUNT + METRIC + name, (~numbers.isnan()).sum())
        return loss

    def update(self, step: int) -> Float[Tensor, ""]:
        """Clip and apply the gradients. Return their norm before clipping, on the device."""
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        norm = clip_gradients(trained, self.config.max_grad_norm)
        set_learning_rate(self.optimizer, lr_scale(self.config, step, self.steps))
        self.optimizer.step()
        return norm

    def _metrics(
        self, ready: ReadyBatch, sums: dict[str, float], num_updates: int
    ) -> dict[str, float | None]:
        fresh, older = sums["fresh_tokens"], sums["older_tokens"]
        vision_lrs = [g["lr"] for g in self.optimizer.param_groups if g["is_vision"]]
        routes = sums["routes"]
        return {
            "loss": sums["loss"] / max(num_updates, 1),
            **{
                key.removeprefix(METRIC): total / num if (num := sums[COUNT + key]) else None
                for key, total in sums.items()
                if key.startswith(METRIC)
            },
            # Null, not 0, if the trainer's current version sampled no token.
            "mismatch_kl": sums["fresh_kl"] / fresh if fresh else None,
            "fresh_tokens": fresh,
            "differing_routes_fraction": sums["differing_routes"] / routes if routes else None,
            "lag_kl": sums["older_kl"] / older if older else None,
            "lr": self.config.lr * lr_scale(self.config, ready.step, self.steps),
            "vision_lr": vision_lrs[0] if vision_lrs else None,
            "trained_tokens": sums["tokens"],
            "tokens": sums["all_tokens"],
            "micro_batches": float(len(ready.micro_batches) * self.dims.data),
            "samples": float(ready.num_samples),
            "images": float(ready.num_slots),
            "distinct_images": float(ready.num_items),
            "bad_media": float(len(ready.dropped)),
            "oom_splits": sums["oom_splits"],
        }
