"""What an optimizer step comes to: metrics, and the logprobs of every token that it trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from sightline.trainer.probe import ImageSwapProbe
from sightline.trainer.step_timer import StepTimer
from sightline.wire.array import Array
from sightline.wire.micro_batch import MicroBatch, StepScores, TokenOrigin


@dataclass(slots=True)
class StepResult:
    metrics: dict[str, float | None]
    """Figures over all ranks, the same on every one."""
    scores: StepScores
    """Logprobs of the trained tokens of all ranks; on rank 0."""
    step_timer: StepTimer
    probe: ImageSwapProbe | None = None
    """Whether the model uses its images, where this step measured it; on rank 0."""
    caches: dict[str, dict[str, float]] = field(default_factory=dict)
    """Hits, misses, evictions and bytes so far, summed over ranks; on rank 0."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of forward, backward and optimizer; waits, on CUDA, for the step to end."""
        return self.step_timer.seconds()


def copy_to_host(
    scored: list[tuple[MicroBatch, torch.Tensor]],
) -> list[tuple[MicroBatch, np.ndarray]]:
    """The logprobs of all micro-batches, in one copy from the device."""
    if not scored:
        return []
    joined = torch.cat([logprobs for _, logprobs in scored]).cpu().numpy()
    ends = np.cumsum([len(logprobs) for _, logprobs in scored])
    parts = np.split(joined, ends[:-1])
    return [(batch, part) for (batch, _), part in zip(scored, parts, strict=True)]


def sum_cache_figures(ranks: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """The figures of each cache over all ranks, which have the same caches."""
    return {
        name: {figure: sum(rank[name][figure] for rank in ranks) for figure in first}
        for name, first in (ranks[0] if ranks else {}).items()
    }


def build_step_scores(step: int, scored: list[tuple[MicroBatch, np.ndarray]]) -> StepScores:
    """Logprobs, ratios and advantages of every trained token, micro-batch by micro-batch."""
    origins: list[TokenOrigin] = []
    at = 0
    for batch, logprobs in scored:
        for o in batch.origins:
            start, stop = o.start + at, o.stop + at
            origins.append(TokenOrigin(trace_id=o.trace_id, node=o.node, start=start, stop=stop))
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
