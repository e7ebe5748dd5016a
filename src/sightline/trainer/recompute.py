"""Compute a recorded step again, with the run's settings or with others.

    samples, checkpoint of the step before --> Learner.step --> metrics, scores, gradient

Nothing is published or saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline.algo.algorithms import load_algorithm
from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trainer.build import build_learner, build_pixels, build_preparer
from sightline.trainer.checkpoint import check_files, open_shards, read_manifest
from sightline.trainer.learner import Learner
from sightline.trainer.snapshot import restore
from sightline.wire.micro_batch import StepScores
from sightline.wire.sample import Batch, Sample


@dataclass(frozen=True)
class RecomputedStep:
    metrics: dict[str, float | None]
    scores: StepScores
    gradient: dict[str, Tensor]
    """The gradient of each trained parameter before clipping, in float32 on the host. Minibatches
    are added up."""

    @property
    def effective_samples(self) -> float:
        """Return the effective sample size of the tokens' importance ratios, from 0 to 1."""
        ratios = self.scores.ratios.numpy().astype(np.float64)
        return float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))


def find_checkpoint(run_dir: RunDir, step: int) -> Path | None:
    """Return the checkpoint that `step` began with, or None for the run's first step."""
    if step == 1:
        return None
    path = run_dir.checkpoints / f"step_{step - 1:06d}"
    if not path.is_dir():
        kept = sorted(int(folder.name[5:]) + 1 for folder in run_dir.checkpoints.glob("step_*"))
        raise ConfigError(
            f"{path} is missing: the run has not kept the weights before step {step}",
            f"choose --step from {', '.join(map(str, [1, *kept]))}, or repeat the run with "
            "trainer.checkpoint_every=1 trainer.keep_checkpoints_every=1",
        )
    check_files(path, read_manifest(path).files)
    return path


def recompute_step(
    config: RunFile, store: MediaStore, samples: Sequence[Sample], step: int, start: Path | None
) -> RecomputedStep:
    """Compute `step` from the checkpoint `start`, on this process's device."""
    # Clipping would hide by how much a change scales the gradient.
    alone = dict.fromkeys(("ranks", "context_parallel", "expert_parallel", "tensor_parallel"), 1)
    trainer = config.trainer.model_copy(update={"max_grad_norm": math.inf, **alone})
    learner = build_learner(
        config.model, trainer, store, config.run.steps,
        algorithm=load_algorithm(config.algorithm), lora=config.lora, seed=config.run.seed,
    )  # fmt: skip
    if start is not None:
        shards = open_shards(start)
        restore(shards, learner.forward.model, learner.optimizer, learner.dims, start)
    # The exact check would end at the first token that a changed setting moves.
    learner.replayed = range(step, step + 1)
    gradient: dict[str, Tensor] = {}
    learner.optimizer.register_step_pre_hook(lambda *_: _add_gradient(learner, gradient))
    preparer = build_preparer(config.media, learner, build_pixels(learner, store))
    result = learner.step(preparer.prepare(Batch(step, list(samples)), digest=""))
    return RecomputedStep(result.metrics, result.scores, gradient)


def _add_gradient(learner: Learner, gradient: dict[str, Tensor]) -> None:
    for name, parameter in learner.forward.model.named_parameters():
        part: Any = learner.optimizer.get_master(parameter).grad
        if part is not None:
            part = part.detach().float().cpu()
            gradient[name] = gradient[name] + part if name in gradient else part.clone()


def measure_cosine(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the cosine of two gradients over the parameters that both train."""
    names = one.keys() & other.keys()
    dots = [
        sum(float(torch.sum(a[name].double() * b[name].double())) for name in names)
        for a, b in ((one, other), (one, one), (other, other))
    ]
    return dots[0] / math.sqrt(dots[1] * dots[2]) if dots[1] * dots[2] else math.nan
