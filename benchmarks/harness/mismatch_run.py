"""Training runs in one process, with an artificial mismatch between sampler and trainer.

    sampler (engine, its own thread) --traces--> filter --samples--> trainer's learner
         ^  version step - 1 - lag                                    |
         +---------- weights of every version, as files --------------+

Engine, chats, verdicts, packing, forward pass and losses are the same as in a real run. The sampler
waits for its version, and the learner waits for all rollouts of its step. Nothing runs ahead, so
the lag is exactly the requested one.
"""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.harness.engine_sampler import Sampler
from sightline.algo.algorithms import GRPO
from sightline.algo.losses import LossFunction, LossInputs, LossOutput, load_loss, tis
from sightline.algo.verdicts import GroupFilter
from sightline.compute.weights import write_weights
from sightline.config import AlgorithmConfig, MediaConfig, ModelConfig, TrainerConfig
from sightline.envs.color_codeword import COLORS, LETTERS, ColorCodeword
from sightline.envs.drawing import encode_png
from sightline.envs.protocol import Task
from sightline.media import MediaStore
from sightline.rollout.evaluation import EVAL_SPLIT, build_eval_request, derive_seed
from sightline.trace import Trace
from sightline.trainer.build import build_learner, build_pixels, build_preparer
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.shard import full_tensor
from sightline.trainer.step_result import MetricSums
from sightline.wire.array import Array
from sightline.wire.control import RolloutRequest
from sightline.wire.sample import Batch, Sample

GRAINY = "benchmarks.harness.mismatch_run:GrainyCodeword"
MAX_PIXELS = 32 * 32
"""Maximum pixels of an image. Larger squares are resized, so the filter matters."""

# The demo's settings with twice its learning rate, so that 20 steps are enough.
TRAINER: dict[str, Any] = {
    "lr": 4e-3, "vision_lr": 3e-4, "warmup_steps": 5, "lr_schedule": "cosine",
    "final_lr_fraction": 0.1, "max_grad_norm": 0.5,
}  # fmt: skip


@dataclass(eq=False)
class GrainyCodeword(ColorCodeword):
    """color_codeword with larger, noisy squares, so that different resize filters give different
    pixels."""

    name = "grainy_codeword"

    side: int = 75
    grain: int = 60
    num_colors: int = 4
    """The number of colours in tasks, out of nine: few enough to learn in 20 steps. The
    demonstrations show all colours and name none."""

    def task(self, index: int, split: str) -> Task:
        rng = self.task_rng(index, split)
        letters = LETTERS if split == "sft" else LETTERS[: self.num_colors]
        pairs = [(rng.choice(letters), rng.randrange(self.shades)) for _ in range(self.turns)]
        return Task(index, split, pairs)

    @cache  # noqa: B019 - an environment lives as long as its process
    def square(self, letter: str, shade: int) -> bytes:
        rng = random.Random(f"{letter}:{shade}")
        near = [c + rng.randint(-self.jitter, self.jitter) for c in COLORS[letter]]
        grain = np.random.default_rng(rng.randrange(1 << 32)).integers(
            -self.grain, self.grain + 1, (self.side, self.side, 3)
        )
        return encode_png(Image.fromarray(np.clip(near + grain, 0, 255).astype(np.uint8)))


# --- the mismatch


@dataclass(frozen=True)
class Mismatch:
    """The differences between sampler and trainer. By default only rounding."""

    is_exact: bool = False
    """Whether the sampler's logprobs are treated as bit-identical to the trainer's."""
    noise: float = 0.0
    """Standard deviation of the noise that is added to the sampler's logprobs."""
    stale_features: int = 0
    """Versions by which the sampler's vision tower is older than its text model."""
    filter: str = ""
    """Pillow's name of the sampler's resize filter. Empty for the trainer's."""
    lag: int = 0
    """Versions between sampling and training."""
    dtype: str = ""
    """Precision of the sampler. Empty for the trainer's."""


def uncorrected(inputs: LossInputs) -> LossOutput:
    """-A log pi: treats every token as sampled by the current policy."""
    return LossOutput(-inputs.advantages * inputs.logprobs, torch.zeros_like(inputs.logprobs))


def importance_weighted(inputs: LossInputs) -> LossOutput:
    """-sg(r) A log pi, with r not truncated: the on-policy gradient, given true logprobs."""
    return tis(inputs, ratio_cap=math.inf)


def load_correction(name: str) -> LossFunction:
    """Load a loss by its name in a run file, or `none`."""
    return uncorrected if name == "none" else load_loss(name)


def add_noise(samples: list[Sample], deviation: float, rng: np.random.Generator) -> list[Sample]:
    """Return the samples with noise added to their logprobs."""
    noisy = []
    for sample in samples:
        noise = rng.normal(0.0, deviation, len(sample.logprobs)).astype(np.float32)
        logprobs = Array.of(sample.logprobs.numpy() + noise, "float32")
        noisy.append(msgspec.structs.replace(sample, logprobs=logprobs))
    return noisy


class Versions:
    """Writes the weights of every version, for the sampler to adopt."""

    def __init__(self, learner: Learner, folder: Path, stale_features: int) -> None:
        self._learner, self._folder, self._stale = learner, folder, stale_features
        self._vision = {name for name, _ in learner.forward.vision_parameters()}
        self._towers: dict[int, dict[str, Tensor]] = {}
        self.paths: list[Path] = []

    def publish(self) -> None:
        """Write the learner's weights as the next version, with a stale tower if configured."""
        version = len(self.paths)
        parameters = self._learner.forward.model.named_parameters()
        tensors = {name: full_tensor(p.detach()).float().cpu().clone() for name, p in parameters}
        self._towers[version] = {name: tensors[name] for name in self._vision}
        tower_version = max(0, version - self._stale)
        tensors |= self._towers[tower_version]
        for old in [v for v in self._towers if 0 < v <= tower_version and v != version]:
            del self._towers[old]
        path, _ = write_weights(self._folder, tensors, version, tower_version)
        self.paths.append(path)

    def forget(self, version: int) -> None:
        """Remove the files of a version that is no longer needed."""
        if version >= 0:
            shutil.rmtree(self.paths[version].parent)


# --- a run


@dataclass(frozen=True)
class StudySize:
    """The size that all runs of a study share."""

    steps: int = 20
    groups: int = 12
    group_size: int = 8
    turns: int = 1
    eval_tasks: int = 96
    gradient_every: int = 4
    device: str = "cpu"
    dtype: str = "float32"


@dataclass
class RunRecord:
    """The results of one run."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's rollouts."""
    final: float = math.nan
    """Mean reward of the trained weights on held-out tasks, without mismatch."""
    kl: float = math.nan
    """Mean KL estimate of sampler and trainer over the trained tokens of all steps."""
    clip_fraction: float = math.nan
    cosines: list[float] = field(default_factory=list)
    """Cosines between the gradient and the on-policy gradient on the same tokens, if the latter
    was measured and not zero."""
    norm_ratios: list[float] = field(default_factory=list)
    """Norms of the gradient divided by those of the on-policy gradient."""
    seconds: float = 0.0


def compute_gradient(learner: Learner, loss: LossFunction, ready: ReadyBatch) -> Tensor:
    """Return the gradient of a policy loss on a batch, without the KL term or an update."""
    algorithm = GRPO(learner.algorithm.settings.model_copy(update={"kl_coef": 0.0}))
    algorithm.policy_loss = loss
    alone = dataclasses.replace(learner, algorithm=algorithm, reference=None)
    alone.optimizer.zero_grad(set_to_none=True)
    for _, micro_batch in ready.iterate_with_pixels():
        alone.backward(micro_batch, MetricSums(SUM_NAMES))
    groups = alone.optimizer.param_groups
    gradients = [
        full_tensor(p.grad).flatten() for g in groups for p in g["params"] if p.grad is not None
    ]
    alone.optimizer.zero_grad(set_to_none=True)
    return torch.cat(gradients).double()


def compare_gradients(gradient: Tensor, true: Tensor) -> tuple[float, float]:
    """Return the cosine between a gradient and the true one, and the ratio of their norms."""
    norm, true_norm = float(gradient.norm()), float(true.norm())
    return float(gradient @ true) / max(norm * true_norm, 1e-300), norm / true_norm


class StudyRun:
    """One run: one mismatch, one correction, one seed."""

    def __init__(
        self, model: Path, folder: Path, size: StudySize, mismatch: Mismatch, correction: str,
        seed: int,
    ) -> None:  # fmt: skip
        self.size, self.mismatch, self.seed, self._folder = size, mismatch, seed, folder
        self.store = MediaStore(folder / "media")
        self.model = ModelConfig.model_validate(
            {"path": str(model), "max_pixels": MAX_PIXELS, "dtype": size.dtype}
        )
        self.env = GrainyCodeword(turns=size.turns, seed=seed)
        trainer = TrainerConfig(**TRAINER, device=size.device)
        algorithm = GRPO(AlgorithmConfig(advantage="no_std", credit="turn", kl_coef=0.1))
        # With bit-identical logprobs every ratio is 1, so all corrections are the same.
        algorithm.policy_loss = uncorrected if mismatch.is_exact else load_correction(correction)
        self.learner = build_learner(
            self.model, trainer, self.store, size.steps, algorithm=algorithm, seed=seed
        )
        pixels = build_pixels(self.learner, self.store)
        self._preparer = build_preparer(MediaConfig(), self.learner, pixels, sampled=False)
        self._group_filter = GroupFilter(mismatch.lag, algorithm)
        self._rng = np.random.default_rng(seed)
        self._clipped: list[float] = []
        self.sampler = self._build_sampler(mismatch)
        self.versions = Versions(self.learner, folder / "weights", mismatch.stale_features)
        self.versions.publish()

    def _build_sampler(self, mismatch: Mismatch) -> Sampler:
        rows = max(self.size.groups * self.size.group_size, self.size.eval_tasks)
        model = self.model.model_copy(update={"dtype": mismatch.dtype or self.model.dtype})
        device = self.size.device
        return Sampler(model, self.env, self.store, device, rows, mismatch.filter)

    def sample(self, step: int) -> list[Trace]:
        """Play the step's rollouts with a version that is `lag` versions old."""
        size = self.size
        self.sampler.engine.adopt(self.versions.paths[max(0, step - 1 - self.mismatch.lag)])
        requests = []
        for group in range(size.groups):
            for i in range(size.group_size):
                name = f"{step}.{group}.{i}"
                task = (step - 1) * size.groups + group
                requests.append(
                    RolloutRequest(
                        name, f"{step}.{group}", task, "train", derive_seed(self.seed, name), 1.0
                    )
                )
        return self.sampler.play(requests)

    def train(self, step: int, traces: list[Trace], record: RunRecord) -> float:
        """Train the step. Return its mean KL estimate between sampler and trainer."""
        size = self.size.group_size
        groups = [traces[i : i + size] for i in range(0, len(traces), size)]
        true = [
            sample for group in groups for sample in self._group_filter.decide(group, step).samples
        ]
        noise = self.mismatch.noise
        reported = add_noise(true, noise, self._rng) if noise else true
        ready = self._preparer.prepare(Batch(step, reported), "")
        if step % self.size.gradient_every == 0:
            algorithm = cast(GRPO, self.learner.algorithm)
            gradient = compute_gradient(self.learner, algorithm.policy_loss, ready)
            truth = self._preparer.prepare(Batch(step, true), "")
            on_policy = compute_gradient(self.learner, importance_weighted, truth)
            if on_policy.any():  # zero if rewards are equal in every group
                cosine, ratio = compare_gradients(gradient, on_policy)
                record.cosines.append(cosine)
                record.norm_ratios.append(ratio)
        result = self.learner.step(ready)
        self.versions.publish()
        self.versions.forget(step - 1 - self.mismatch.lag)
        self._clipped.append(result.metrics["clip_fraction"] or 0.0)
        fresh, older = result.metrics["mismatch_kl"], result.metrics["lag_kl"]
        kl = fresh if fresh is not None else older
        return 0.0 if kl is None or self.mismatch.is_exact else kl

    def run(self) -> RunRecord:
        began, record, kls = time.monotonic(), RunRecord(), []
        for step in range(1, self.size.steps + 1):
            traces = self.sample(step)
            record.rewards.append(fmean(trace.reward or 0.0 for trace in traces))
            kls.append(self.train(step, traces, record))
        record.kl, record.clip_fraction = fmean(kls), fmean(self._clipped)
        record.final = self._evaluate()
        record.seconds = time.monotonic() - began
        return record

    def _evaluate(self) -> float:
        """Return the trained weights' reward on held-out tasks, without mismatch."""
        self.close()
        self.sampler = self._build_sampler(Mismatch())
        clean = Versions(self.learner, self._folder / "trained", 0)
        clean.publish()
        self.sampler.engine.adopt(clean.paths[0])
        tasks = range(self.size.eval_tasks)
        traces = self.sampler.play([build_eval_request(i, EVAL_SPLIT, 0, 1.0) for i in tasks])
        return fmean(trace.reward or 0.0 for trace in traces)

    def close(self) -> None:
        self.sampler.close()
