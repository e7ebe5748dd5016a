"""The best way to share GPUs between servers and trainer, by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sightline.bench.harness.simulation import (
    Machines,
    Predicted,
    Simulation,
    Speeds,
    Workload,
)

SHARES = (0.25, 0.5, 0.75)
"""Of servers, tried first; the best is compared with those half-way to its neighbours."""
STATE_BYTES = 9
"""Of a trainer, for every byte of a bfloat16 model: weights and gradients, and in float32 the
master weights and the optimizer's two moments."""


@dataclass(frozen=True)
class Layout:
    gpus: int
    servers: int
    trainer_bytes: float
    """Of weights, gradients and the optimizer's state on each GPU of the trainer."""
    predicted: Predicted

    @property
    def tokens_per_s(self) -> float:
        return self.predicted.tokens_sampled / self.predicted.seconds

    @property
    def step_s(self) -> float:
        return self.predicted.seconds / self.predicted.steps


def find_best_layout(
    work: Workload, speeds: Speeds, machines: Machines, gpus: int, steps: int
) -> Layout:
    """The share of servers that samples and trains most."""
    tried: dict[int, Layout] = {}

    def try_share(share: float) -> Layout:
        count = min(max(round(gpus * share), 1), gpus - 1)
        if count not in tried:
            placed = replace(machines, servers=count, trainer_gpus=gpus - count)
            held = STATE_BYTES * speeds.model_bytes / placed.trainer_gpus
            found = Simulation(work, speeds, placed).run(steps)
            tried[count] = Layout(gpus, count, held, found)
        return tried[count]

    best = max(SHARES, key=lambda share: try_share(share).tokens_per_s)
    for share in (best - 0.125, best + 0.125):
        try_share(share)
    return max(tried.values(), key=lambda layout: layout.tokens_per_s)
