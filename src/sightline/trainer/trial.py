"""Steps on batches of a given shape, for measuring: the trainer's own parts, samples made up."""

from __future__ import annotations

import random
import string
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sightline.config import Model, Trainer
from sightline.envs.screenshots import Screenshots, marked
from sightline.families import load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import assistant, user
from sightline.pack import Cost, Price, Work
from sightline.trainer.build import build_learner, build_materializer
from sightline.trainer.feed import Preparer, ReadyBatch
from sightline.trainer.price import price_of
from sightline.trainer.ranks import ALONE, Ranks
from sightline.trainer.sft import sample_of
from sightline.wire.sample import Batch

NO_LIMIT = Cost(1 << 30, 1 << 30)


@dataclass(frozen=True)
class Shape:
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

    def __str__(self) -> str:
        shown = f", {self.images} x {self.side}x{self.side}" if self.images else ""
        shared = f", groups of {self.group}" if self.group > 1 else ""
        return f"{self.samples} x ({self.text} + {self.answer}{shown}){shared}"


class Trial:
    """One model, one store, and as many steps as are asked for; the weights hardly move."""

    def __init__(self, model: Path, folder: Path, device: str, ranks: Ranks = ALONE) -> None:
        self.store = MediaStore(folder / "media")
        settings = Trainer(device=device, lr=1e-9)
        self.learner = build_learner(
            Model(path=str(model)), settings, self.store, steps=1 << 30, ranks=ranks
        )
        self.renderer = load_renderer(model, self.store, self.learner.family)
        self._materializer = build_materializer(self.learner, self.store)
        self._pages: dict[int, bytes] = {}

    @property
    def counted(self) -> Price:
        return price_of(self.learner.forward)

    def close(self) -> None:
        self._materializer.close()

    def ready(self, shape: Shape, seed: int = 0, limit: Cost = NO_LIMIT) -> ReadyBatch:
        """The batch, with its pixels made."""
        preparer = Preparer(self.learner.family, self._materializer, limit, 0.0)
        return preparer.prepare(self.batch(shape, seed), "")

    def batch(self, shape: Shape, seed: int = 0) -> Batch:
        rng = random.Random(f"{shape}:{seed}")
        samples = []
        for i in range(shape.samples):
            if i % shape.group == 0:
                shown = [self._image(shape.side, f"{seed}.{i}.{j}") for j in range(shape.images)]
                prompt = user(*shown, _letters(rng, shape.text))
            talk = [prompt, assistant(_letters(rng, shape.answer))]
            samples.append(sample_of(talk, self.renderer, f"{seed}.{i}"))
        return Batch(1, samples)

    def step(self, ready: ReadyBatch) -> float:
        """Takes the step; its seconds, of CPU time where the CPU computes."""
        began = self._now()
        self.learner.step(ready)
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
        return self.store.put(marked(self._pages[side], name))


def works(ready: ReadyBatch) -> list[Work]:
    return [Work.of(one.batch) for one in ready.micro_batches]


def set_threads(num: int) -> None:
    torch.set_num_threads(num)


def _letters(rng: random.Random, num: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=num))
