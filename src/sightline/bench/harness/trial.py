"""Steps on batches of a given shape, for measuring: the trainer's own parts, samples made up."""

from __future__ import annotations

import random
import resource
import statistics
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from sightline.bench.harness.screenshots import Screenshots, add_text_chunk
from sightline.compute.attention_cudnn import MIN_SHAPE_REPEATS
from sightline.config import ModelConfig, TrainerConfig
from sightline.errors import ConfigError
from sightline.families import load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import Message, assistant, user
from sightline.pack import CostModel, MicroBatchWork, PackSize
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.build import build_learner, build_pixels
from sightline.trainer.distribute import BatchDistributor, ShareReader
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.price import estimate_price
from sightline.trainer.ranks import SINGLE_RANK, FollowerChannel, LeadChannel, RankInfo
from sightline.trainer.sft import build_sample
from sightline.wire.sample import Batch

NO_LIMIT = PackSize(1 << 30, 1 << 30)


@dataclass(frozen=True)
class BatchShape:
    """A batch: so many samples of a prompt with images and text, and an answer that trains."""

    samples: int
    text: int
    """Letters of the prompt."""
    answer: int
    """Letters of the answer."""
    images: int = 0
    side: int = 64
    """Pixels of an image, across and down."""
    group: int = 1
    """Samples that share a prompt."""
    turns: int = 1
    """Each with its own text, images and answer."""

    def __str__(self) -> str:
        shown = f", {self.images} x {self.side}x{self.side}" if self.images else ""
        shared = f", groups of {self.group}" if self.group > 1 else ""
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        return f"{self.samples} x ({self.text} + {self.answer}{shown}){turns}{shared}"


class StepBench:
    """One model, one store, and as many steps as are asked for; the weights hardly move."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        device: str,
        ranks: RankInfo = SINGLE_RANK,
        dtype: str = "float32",
    ) -> None:
        self.store = MediaStore(folder / "media")
        settings = TrainerConfig(device=device, lr=1e-9, master_dtype="model")
        chosen = ModelConfig.model_validate({"path": str(model), "dtype": dtype})
        self.learner = build_learner(chosen, settings, self.store, steps=1 << 30, ranks=ranks)
        self.renderer = load_renderer(model, self.store, self.learner.family)
        self.pixels = build_pixels(self.learner, self.store)
        self._pages: dict[int, bytes] = {}

    @property
    def warm_up(self) -> int:
        """Steps on a shape until it is computed as it will be from then on."""
        return MIN_SHAPE_REPEATS if self.learner.device.type == "cuda" else 1

    @property
    def counted(self) -> CostModel:
        return estimate_price(self.learner.forward)

    def close(self) -> None:
        self.pixels.materializer.close()

    def ready(self, shape: BatchShape, seed: int = 0, limit: PackSize = NO_LIMIT) -> ReadyBatch:
        """The batch, with its pixels made."""
        unverified = BadMediaPolicy(allows_unverified_pixels=True)
        preparer = BatchPreparer(self.learner.family, self.pixels.materializer, limit, unverified)
        return preparer.prepare(self.batch(shape, seed), "").with_pixels()

    def batch(self, shape: BatchShape, seed: int = 0) -> Batch:
        rng = random.Random(f"{shape}:{seed}")
        samples = []
        for i in range(shape.samples):
            if i % shape.group == 0:
                prompts = [self._prompt(shape, rng, f"{seed}.{i}.{t}") for t in range(shape.turns)]
            talk: list[Message] = []
            for prompt in prompts:
                talk += [prompt, assistant(_random_letters(rng, shape.answer))]
            sample = build_sample(talk, self.renderer, f"{seed}.{i}")
            # Prefixes are shared within a group.
            samples.append(msgspec.structs.replace(sample, group_id=str(i // shape.group)))
        return Batch(1, samples)

    def _prompt(self, shape: BatchShape, rng: random.Random, name: str) -> Message:
        shown = [self._image(shape.side, f"{name}.{j}") for j in range(shape.images)]
        return user(*shown, _random_letters(rng, shape.text))

    def step(self, ready: ReadyBatch) -> float:
        """Takes the step; its seconds, of CPU time where the CPU computes."""
        began = self._now()
        try:
            self.learner.step(ready)
        except torch.OutOfMemoryError as error:
            tokens = sum(len(one.batch.token_ids) for one in ready.micro_batches)
            raise ConfigError(
                f"a step of {tokens:,} tokens and {ready.num_items} images takes more memory than "
                f"{self.learner.device} has",
                "take smaller shapes (--scale of `bench cost`), a smaller model or a larger device",
            ) from error
        return self._now() - began

    def _now(self) -> float:
        # On a machine that does other work too, what counts is the work, not the waiting.
        if self.learner.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def _image(self, side: int, name: str) -> MediaRef:
        if side not in self._pages:
            self._pages[side] = Screenshots(1, side, side).draw(random.Random(side))
        return self.store.put(add_text_chunk(self._pages[side], name))


def works(ready: ReadyBatch) -> list[MicroBatchWork]:
    return [MicroBatchWork.of(one.batch) for one in ready.micro_batches]


class ScalePoint(msgspec.Struct, frozen=True):
    """Steps to be measured in processes of their own."""

    model: str
    folder: str
    shape: BatchShape
    max_tokens: int
    """The most tokens of a micro-batch."""
    repeats: int


class RankMeasurement(msgspec.Struct, frozen=True):
    """What a rank saw."""

    wall_s: float
    """Median wall time of a step."""
    cpu_s: float
    peak_mb: float
    """The most that the process ever held."""
    start_mb: float
    """Before the first step."""
    tokens: int
    """Tokens in the rank's micro-batches of a step."""


def measure_steps(point: ScalePoint, ranks: RankInfo) -> RankMeasurement:
    """One rank's part: as many steps as are wanted, and one before that is not counted."""
    trial = StepBench(Path(point.model), Path(point.folder), "cpu", ranks)
    batches = (
        _single_rank_batches(trial, point)
        if ranks.size == 1
        else _rank_batches(trial, point, ranks)
    )
    walls: list[float] = []
    cpus: list[float] = []
    tokens = 0
    start_mb = _peak_mb()
    for ready in batches:
        if ranks.size > 1:
            dist.barrier()
        began, cpu = time.perf_counter(), trial.step(ready)
        walls.append(time.perf_counter() - began)
        cpus.append(cpu)
        tokens = sum(work.tokens for work in works(ready))
    if ranks.size > 1:
        dist.barrier()  # no rank goes before the others have heard that it is over
    trial.close()
    wall_s, cpu_s = statistics.median(walls[1:]), statistics.median(cpus[1:])
    return RankMeasurement(wall_s, cpu_s, _peak_mb(), start_mb, tokens)


def _single_rank_batches(trial: StepBench, point: ScalePoint) -> Iterator[ReadyBatch]:
    for step in range(1, point.repeats + 2):
        yield replace(_prepare_batch(trial, point), step=step)


def _rank_batches(trial: StepBench, point: ScalePoint, ranks: RankInfo) -> Iterator[ReadyBatch]:
    if not ranks.is_lead:
        follow = FollowerChannel(ranks)
        follow.report_ready()
        shares = ShareReader(follow, trial.pixels, trial.learner.family.num_axes)
        yield from (share.with_pixels() for share in shares)
        return
    lead = LeadChannel(ranks)
    lead.wait_until_loaded()
    distributor = BatchDistributor(lead, ParallelDims.of(ranks), trial.counted)
    yield from distributor.iterate_shares(_single_rank_batches(trial, point))


def _prepare_batch(trial: StepBench, point: ScalePoint) -> ReadyBatch:
    return trial.ready(point.shape, limit=PackSize(point.max_tokens, 1 << 30))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def set_threads(num: int) -> None:
    torch.set_num_threads(num)


def _random_letters(rng: random.Random, num: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=num))
