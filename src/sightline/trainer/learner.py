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

from sightline.compute.attention import pattern_of
from sightline.compute.logprobs import chosen_logprobs
from sightline.compute.transfer import send
from sightline.config import Trainer
from sightline.errors import Misaligned
from sightline.families import Family, Forward
from sightline.pixels import PixelCounts
from sightline.trainer import loss as losses
from sightline.trainer.blocks import num_compiled
from sightline.trainer.checks import check_features, check_micro_batch, check_patches
from sightline.trainer.features import Features, encode_blank
from sightline.trainer.feed import ReadyBatch, ReadyMicroBatch
from sightline.trainer.laps import Laps
from sightline.trainer.optimizer import lr_scale, set_learning_rate
from sightline.trainer.probe import Probe, accompany, choose, probe
from sightline.trainer.pulse import Pulse
from sightline.trainer.ranks import Ranks
from sightline.trainer.score import Scored, Scorer
from sightline.trainer.shard import (
    Whole,
    agree,
    gather_to_lead,
    sum_over_ranks,
    whole_tensor,
)
from sightline.trainer.tally import Tally
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, Origin
from sightline.wire.score import StepScores

T = TypeVar("T")
SUMS = (
    "all_tokens", "clipped", "entropy", "fresh_kl", "fresh_tokens", "kl_ref", "loss", "older_kl",
    "older_tokens", "tokens",
)  # fmt: skip
_DIVERGED = (
    "start a new run, with a lower [trainer] lr, from the last checkpoint: it is whole, and these "
    "weights were not published"
)


@dataclass(slots=True)
class Stepped:
    """What a step did."""

    metrics: dict[str, float | None]
    scores: StepScores
    laps: Laps
    probe: Probe | None = None
    """Whether the model looks, where this step asked."""
    caches: dict[str, dict[str, float]] = field(default_factory=dict)
    """Hits, misses, evictions and bytes so far, summed over ranks; on rank 0."""

    @property
    def seconds(self) -> dict[str, float]:
        """Of its parts: forward, backward, optimizer."""
        return self.laps.seconds()


def hidden_of(
    forward: Forward,
    ready: ReadyMicroBatch,
    family: Family,
    device: torch.device,
    kept: Features | None = None,
) -> torch.Tensor:
    """The hidden states (S, H) that predict the trained tokens. Each image is encoded once, or
    comes from what is kept of a frozen tower."""
    batch = ready.batch
    token_ids = send(batch.token_ids.numpy().astype(np.int64), device)[None]
    positions = send(batch.positions.numpy().astype(np.int64), device)[:, None]
    features = places = encoded = None
    blank = None
    check_patches(batch, ready.patches)
    if kept is not None:
        encoded = kept.of(ready, device)
    elif ready.patches is not None:
        patches = send(ready.patches, device)
        encoded = forward.encode(patches, [entry.item.grid for entry in batch.items])
    elif ready.shows:
        blank = encode_blank(forward, device)
    if encoded is not None:
        index, where = _places(batch, family)
        check_features(batch, len(encoded), family)
        features = encoded[send(index, device)]
        places = send(where, device)
    dtype = next(forward.model.parameters()).dtype
    pattern = pattern_of(batch.subtree_end.numpy(), device, dtype)
    hidden = forward.hidden(token_ids, positions, features, places, pattern)[0]
    if blank is not None:
        hidden = hidden + 0.0 * blank.to(hidden.dtype)
    predicting = batch.parent.numpy()[batch.trained.numpy()].astype(np.int64)
    return hidden[send(predicting, device)]


def _places(batch: MicroBatch, family: Family) -> tuple[np.ndarray, np.ndarray]:
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
    optimizer: torch.optim.AdamW
    family: Family
    config: Trainer
    steps: int
    pad_ids: tuple[int, ...]
    vocab_size: int
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    whole: Whole | None = None
    """Around the sharded model; None where one rank holds all of it."""
    reference_whole: Whole | None = None
    features: Features | None = None
    """Of the tower, where it is frozen."""
    reference_features: Features | None = None
    pixels: PixelCounts | None = None
    """Of what makes this rank's pixels."""
    pulse: Pulse = field(default_factory=Pulse)
    imitates: bool = False
    """Supervised: the tokens are to be said, whoever said them first."""
    probe_every: int = 0
    """Steps between two looks at whether the model looks; 0 is never."""
    banned: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.banned = torch.tensor(self.pad_ids, dtype=torch.long, device=self.device)

    def step(self, ready: ReadyBatch) -> Stepped:
        """Turns policy version step-1 into version step."""
        began = time.monotonic()
        tally = Tally((*SUMS, "grad_norm"))
        scored: list[tuple[MicroBatch, torch.Tensor]] = []
        compiled = num_compiled() if self.config.compile else 0
        self.optimizer.zero_grad(set_to_none=True)
        laps = Laps(self.device)
        for number, micro_batch in enumerate(ready.micro_batches, start=1):
            self.pulse.mark(f"micro-batch {number} of step {ready.step}")
            check_micro_batch(micro_batch.batch, self.family, self.pad_ids, self.vocab_size)
            tally.count("all_tokens", len(micro_batch.batch.token_ids))
            if len(micro_batch.batch.trained) or self.ranks.size > 1:
                logprobs = self._backward(micro_batch, ready.step, tally, laps)
                scored.append((micro_batch.batch, logprobs))
        looked = self._probe(ready)
        if looked is not None:
            laps.end("probe")
        self.pulse.mark(f"the update of step {ready.step}")
        tally.add("grad_norm", self.update(ready.step))
        laps.end("optimizer")
        # The first time in the step that the host waits for the device. What diverged has spoilt
        # these weights, which end here: they are neither published nor kept.
        sums, said = tally.read(), _to_host(scored)
        norm = sums.pop("grad_norm")
        if not math.isfinite(sums["loss"]):
            raise Misaligned(f"step {ready.step}: the loss is {sums['loss']}", _DIVERGED)
        # One rank's loss spoils the norm of all: here the others wait to be told whose it was.
        metrics = self._metrics(ready, sum_over_ranks(sums, self.ranks.size))
        if not math.isfinite(norm):
            raise Misaligned(f"step {ready.step}: the gradient's norm is {norm}", _DIVERGED)
        metrics["grad_norm"] = norm
        metrics["compilations"] = num_compiled() - compiled if self.config.compile else None
        metrics["compute_s"] = time.monotonic() - began
        everyone = gather_to_lead((said, self._caches()), self.ranks)
        scores = _scores(ready.step, [one for rank, _ in everyone for one in rank])
        return Stepped(metrics, scores, laps, looked, _summed([caches for _, caches in everyone]))

    def _caches(self) -> dict[str, dict[str, int]]:
        """Of this rank."""
        found = {} if self.pixels is None else {"trainer_pixels": self.pixels.figures()}
        if (kept := self.features or self.reference_features) is not None:
            found["trainer_features"] = kept.cache.figures()
        return found

    def _probe(self, ready: ReadyBatch) -> Probe | None:
        """Asks one micro-batch of the step, before the update; what it says comes to rank 0."""
        if not self.probe_every or ready.step % self.probe_every:
            return None
        own = choose(ready.micro_batches)
        names = agree([] if own is None else [own[0]], self.ranks.size)
        if not names:
            return None
        self.pulse.mark(f"the probe of step {ready.step}")
        found = None
        if own is not None and own[0] == min(names):
            found = probe(own[1], self.score)
        else:
            smallest = min(ready.micro_batches, key=lambda m: len(m.batch.token_ids))
            accompany(smallest, self.score)
        everyone = gather_to_lead(found, self.ranks)
        return next((one for one in everyone if one is not None), None)

    def score(self, ready: ReadyMicroBatch) -> np.ndarray:
        """The logprobs (S,) of the trained tokens; nothing is learnt."""
        with torch.no_grad():
            logprobs = self.within(self._logprobs, ready)
        if self.whole is not None:
            self.whole.reshard()  # without a backward pass nothing else does
        return logprobs.cpu().numpy()

    @torch.no_grad()
    def evaluate(self, ready: ReadyBatch) -> tuple[float, float]:
        """The summed -log pi of the trained tokens, and how many they are; nothing is learnt."""
        tally = Tally(("nll", "tokens"))
        for number, micro_batch in enumerate(ready.micro_batches, start=1):
            self.pulse.mark(f"micro-batch {number} of the evaluation after step {ready.step}")
            check_micro_batch(micro_batch.batch, self.family, self.pad_ids, self.vocab_size)
            if len(micro_batch.batch.trained) or self.ranks.size > 1:
                logprobs = self.within(self._logprobs, micro_batch)
                tally.add("nll", -logprobs.double().sum())
                tally.count("tokens", len(logprobs))
        if self.whole is not None:
            self.whole.reshard()  # without a backward pass nothing else does
        total = sum_over_ranks(tally.read(), self.ranks.size)
        return total["nll"], total["tokens"]

    def _logprobs(self, ready: ReadyMicroBatch) -> torch.Tensor:
        batch = ready.batch
        hidden = hidden_of(self.forward, ready, self.family, self.device, self.features)
        tokens = _tensor(batch.token_ids.numpy()[batch.trained.numpy()], self.device).long()
        return chosen_logprobs(self.forward, hidden, tokens, self.banned, batch.temperature)

    def _backward(
        self, ready: ReadyMicroBatch, step: int, tally: Tally, laps: Laps
    ) -> torch.Tensor:
        total, chosen = self.within(self._beside_reference, ready, step, tally)
        laps.end("forward")
        # Gradients are averaged over ranks, and the losses of a step are to be added.
        (total * self.ranks.size).backward()
        laps.end("backward")
        tally.add("loss", total)
        return chosen

    def within(self, function: Callable[..., T], *args: Any) -> T:
        """Calls `function` with the parameters at hand, where they are sharded."""
        return _within(self.whole, function, *args)

    def _beside_reference(
        self, ready: ReadyMicroBatch, step: int, tally: Tally
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, with the reference gathered once, however many tokens this rank trains.

        It comes back past the reference's own call: what that returns, FSDP would gather the
        reference for again in the backward pass.
        """
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        _within(self.reference_whole, lambda: found.append(self._loss(ready, step, tally)))
        return found[0]

    def _loss(
        self, ready: ReadyMicroBatch, step: int, tally: Tally
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = ready.batch
        hidden = hidden_of(self.forward, ready, self.family, self.device, self.features)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                kept = self.reference_features
                reference = hidden_of(self.reference, ready, self.family, self.device, kept)
        tokens = _tensor(batch.token_ids.numpy()[batch.trained.numpy()], self.device).long()
        old = _tensor(batch.logprobs.numpy(), self.device)
        advantages = _tensor(batch.advantages.numpy(), self.device)
        weight = _tensor(batch.loss_weight.numpy(), self.device)
        own = batch.versions.numpy() == step - 1
        scorer = Scorer(
            self.forward,
            self.reference,
            self.banned,
            batch.temperature,
            self.config.entropy,
            backend=self.config.compile,
        )
        scored = scorer.score(hidden, tokens, reference)
        logprobs = scored.logprobs
        _measure(tally, scored, old, own)
        token_loss, held = self._policy_loss(logprobs, old, advantages, batch)
        tally.add("clipped", held.sum())
        if scored.kl is not None:
            token_loss = token_loss + self.config.kl_weight * scored.kl
            tally.add("kl_ref", scored.kl.detach().sum())
        total = (token_loss * weight).sum()
        if self.ranks.size > 1:
            # Also where nothing trains: every parameter needs a gradient on every rank.
            total = total + self.forward.logits(hidden[:0]).float().sum()
        return total, logprobs.detach()

    def _policy_loss(
        self,
        logprobs: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        batch: MicroBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.imitates:
            return losses.imitation_loss(logprobs)
        bounds = (self.config.clip_low, self.config.clip_high)
        match self.config.loss:
            case "ppo":
                return losses.clipped_policy_loss(logprobs, old, advantages, *bounds)
            case "cispo":
                return losses.cispo_loss(logprobs, old, advantages, *bounds)
            case "tis":
                cap = self.config.importance_cap
                return losses.truncated_importance_loss(logprobs, old, advantages, cap)
            case "gspo":
                # A sequence is what one model call said.
                lengths = [o.stop - o.start for o in batch.origins]
                places = np.repeat(np.arange(len(lengths)), lengths)
                sequences = send(places, logprobs.device)
                return losses.gspo_loss(logprobs, old, advantages, sequences, *bounds)

    def update(self, step: int) -> torch.Tensor:
        """Clips and applies the gradients; their norm before clipping, still on the device."""
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        parameters = [p for p in held if p.grad is not None]
        norm = whole_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_norm))
        set_learning_rate(self.optimizer, lr_scale(self.config, step, self.steps))
        self.optimizer.step()
        return norm

    def _metrics(self, ready: ReadyBatch, sums: dict[str, float]) -> dict[str, float | None]:
        num = max(sums["tokens"], 1.0)
        fresh, older = sums["fresh_tokens"], sums["older_tokens"]
        packed = [m.batch for m in ready.micro_batches]
        return {
            "loss": sums["loss"],
            "entropy": sums["entropy"] / num if self.config.entropy else None,
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


def _within(whole: Whole | None, function: Callable[..., T], *args: Any) -> T:
    # Nothing as an argument: FSDP on a GPU hands on copies, and sums are to come back.
    result: T = function(*args) if whole is None else whole(lambda: function(*args))
    return result


def _measure(tally: Tally, scored: Scored, old: torch.Tensor, own: np.ndarray) -> None:
    """`own` says which tokens the version that is trained sampled itself."""
    with torch.no_grad():
        kl = losses.mismatch_kl(scored.logprobs, old)
        tally.count("tokens", len(kl))
        if scored.entropy is not None:
            tally.add("entropy", scored.entropy.sum())
        for name, chosen in (("fresh", own), ("older", ~own)):
            tally.count(f"{name}_tokens", int(chosen.sum()))
            # By places that the host knows: a mask on the device would have to be counted first.
            tally.add(f"{name}_kl", kl[_tensor(np.flatnonzero(chosen), kl.device)].sum())


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return send(array.copy(), device)


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


def _summed(ranks: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """The figures of each cache over all ranks, which have the same caches."""
    return {
        name: {figure: sum(rank[name][figure] for rank in ranks) for figure in first}
        for name, first in (ranks[0] if ranks else {}).items()
    }


def _scores(step: int, scored: list[tuple[MicroBatch, np.ndarray]]) -> StepScores:
    origins: list[Origin] = []
    at = 0
    for batch, logprobs in scored:
        for o in batch.origins:
            origins.append(Origin(o.trace_id, o.node, o.start + at, o.stop + at))
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
