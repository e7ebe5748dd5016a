"""The results of a step: metrics, seconds, and the logprobs of every trained token."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Num
from torch import Tensor

from sightline.algo.losses import mismatch_kl
from sightline.errors import PolicyMismatch
from sightline.trainer.probe import ImageSwapProbe
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, StepScores, TokenOrigin


class MetricSums:
    """Sums over the micro-batches of a step, which stay on the device until all are read.

    Reading a number makes the host wait for all work that the device has queued.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._host = dict.fromkeys(names, 0.0)
        self._device: dict[str, Tensor] = {}

    def count(self, name: str, value: float) -> None:
        """Add a number from the host."""
        self._host[name] = self._host.get(name, 0.0) + value

    def add(self, name: str, value: Num[Tensor, ""]) -> None:
        """Add a number from the device. All sums are in float64."""
        value = value.detach().double()
        known = self._device.get(name)
        self._device[name] = value if known is None else known + value

    def merge(self, other: MetricSums) -> None:
        for name, number in other._host.items():
            self._host[name] = self._host.get(name, 0.0) + number
        for name, value in other._device.items():
            self.add(name, value)

    def read(self) -> dict[str, float]:
        """Return all sums, with one copy from the device."""
        sums = dict(self._host)
        if self._device:
            values = torch.stack(list(self._device.values())).tolist()
            for name, value in zip(self._device, values, strict=True):
                sums[name] = sums.get(name, 0.0) + value
        return sums


class StepTimer:
    """Measures the parts of a step without making the host wait for the device.

    On CUDA a lap ends with an event in the device's queue. `seconds` reads the times between
    events.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.end("")

    def end(self, lap: str) -> None:
        mark: Any = time.monotonic()
        if self._is_cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((lap, mark))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each lap. On CUDA it waits for the last event."""
        seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        if self._is_cuda:
            self._marks[-1][1].synchronize()
        for (_, before), (lap, mark) in pairwise(self._marks):
            spent_s = before.elapsed_time(mark) / 1e3 if self._is_cuda else mark - before
            seconds[lap] = seconds.get(lap, 0.0) + spent_s
        return seconds


@dataclass(slots=True)
class StepResult:
    metrics: dict[str, float | None]
    """Metrics over all ranks, equal on every rank."""
    scores: StepScores
    """Logprobs of the trained tokens of all ranks. Only on rank 0."""
    step_timer: StepTimer
    """Seconds of forward, backward and optimizer."""
    probe: ImageSwapProbe | None = None
    """The image-swap probe, if this step ran one. Only on rank 0."""
    caches: dict[str, dict[str, float]] = field(default_factory=dict)
    """Hits, misses, evictions and bytes so far, summed over ranks. Only on rank 0."""


def copy_to_host(scored: list[tuple[MicroBatch, Tensor]]) -> list[tuple[MicroBatch, np.ndarray]]:
    """Return the logprobs of all micro-batches, with one copy from the device."""
    if not scored:
        return []
    batches, logprobs = zip(*scored, strict=True)
    parts = torch.cat(logprobs).cpu().split([len(part) for part in logprobs])
    return [(batch, part.numpy()) for batch, part in zip(batches, parts, strict=True)]


def check_same_bits(step: int, scored: list[tuple[MicroBatch, np.ndarray]]) -> None:
    """Raise if a token of version `step` - 1 has different logprob bits than the sampler's."""
    for batch, logprobs in scored:
        sampler, is_fresh = batch.logprobs.numpy(), batch.versions.numpy() == step - 1
        differs = np.flatnonzero((sampler != logprobs) & is_fresh)
        if len(differs):
            at = int(differs[0])
            origin = next(o for o in batch.origins if o.start <= at < o.stop)
            token = int(batch.token_ids.numpy()[batch.trained.numpy()[at]])
            raise PolicyMismatch(
                f"step {step}: {len(differs)} of {int(is_fresh.sum())} tokens that version "
                f"{step - 1} sampled have different logprobs in the trainer, with [model] exact. "
                f"The first is token {token}, number {at - origin.start} of node {origin.node} in "
                f"rollout {origin.trace_id}: {sampler[at]!r} at the sampler, {logprobs[at]!r} at "
                "the trainer",
                "the step was neither published nor kept. Use the same kind of device and the same "
                "version of torch for server and trainer. If they are equal, report this with the "
                "run directory, or start a new run without exact",
            )


def sum_mismatch(step: int, scored: list[tuple[MicroBatch, np.ndarray]]) -> dict[str, float]:
    """Sum the KL of sampler and trainer over tokens that version `step` - 1 sampled, and others."""
    names = ("tokens", "fresh_tokens", "fresh_kl", "older_tokens", "older_kl")
    sums = dict.fromkeys(names, 0.0)
    for batch, logprobs in scored:
        sampler = torch.from_numpy(batch.logprobs.numpy().copy())
        kl = mismatch_kl(torch.from_numpy(logprobs), sampler).numpy()
        is_fresh = batch.versions.numpy() == step - 1
        sums["tokens"] += len(kl)
        for name, chosen in (("fresh", is_fresh), ("older", ~is_fresh)):
            sums[f"{name}_tokens"] += float(chosen.sum())
            sums[f"{name}_kl"] += float(kl[chosen].sum())
    return sums


def sum_cache_figures(ranks: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, float]]:
    return {
        name: {figure: sum(rank[name][figure] for rank in ranks) for figure in first}
        for name, first in (ranks[0] if ranks else {}).items()
    }


def build_step_scores(step: int, scored: list[tuple[MicroBatch, np.ndarray]]) -> StepScores:
    """Join the logprobs, ratios and advantages of every trained token."""
    origins: list[TokenOrigin] = []
    at = 0
    for batch, logprobs in scored:
        for o in batch.origins:
            start, stop = o.start + at, o.stop + at
            origins.append(TokenOrigin(trace_id=o.trace_id, node=o.node, start=start, stop=stop))
        at += len(logprobs)
    none = np.zeros(0, dtype=np.float32)
    trainer = np.concatenate([none, *(logprobs for _, logprobs in scored)])
    sampler = np.concatenate([none, *(batch.logprobs.numpy() for batch, _ in scored)])
    advantages = np.concatenate([none, *(batch.advantages.numpy() for batch, _ in scored)])
    arrays = (Array.of(x, "float32") for x in (trainer, np.exp(trainer - sampler), advantages))
    return StepScores(step, origins, *arrays)
