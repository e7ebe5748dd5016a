"""counting: answer with the number of blobs in a picture, in one turn and one digit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from sightline.envs.drawing import DIGITS, draw_glyph, encode_png
from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.errors import ConfigError
from sightline.message import Message, assistant, user

PAPER_LEVELS = (225, 255)
INK_LEVELS = (0, 30)


@dataclass(frozen=True)
class Scene:
    """The picture of a task: the cells with a blob, and the seed of random variations."""

    cells: tuple[int, ...]
    seed: int


@dataclass(eq=False)
class Counting(Environment):
    """Pictures of one to `most` blobs on a grid of `cells` x `cells` cells."""

    name = "counting"

    most: int = 5
    side: int = 32
    cells: int = 3
    malformed_penalty: float = 0.3
    spelled_fraction: float = 0.75
    """Fraction of demonstrations that show pictures of digits."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.most <= min(9, self.cells * self.cells):
            raise ConfigError(
                f"counting: most = {self.most} is too large for {self.cells} x {self.cells} cells",
                "count to 9 at the most, and no further than there are cells",
            )
        if self.side < 4 * self.cells:
            raise ConfigError(
                f"counting: {self.cells} cells do not fit in {self.side} pixels",
                "give a cell 4 pixels or more",
            )

    def task(self, index: int, split: str) -> Task:
        rng = self.task_rng(index, split)
        count = rng.randint(1, self.most)
        cells = rng.sample(range(self.cells * self.cells), count)
        return Task(index, split, Scene(tuple(sorted(cells)), rng.getrandbits(32)))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        answer = (await chat.send([user(chat.put(self.draw(task.data)))])).text
        right = answer == str(len(task.data.cells))
        malformed = answer not in self.answers
        return Outcome(
            reward=float(right) - self.malformed_penalty * malformed,
            parts={"right": float(right), "malformed": float(malformed)},
        )

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """Teach the format but not counting: the answer to a picture of blobs is a random digit.

        A fraction of the conversations shows the answer's digit as a picture, which teaches the
        model to use the image.
        """
        digit = rng.choice(self.answers)
        if rng.random() < self.spelled_fraction:
            image = encode_png(draw_glyph(DIGITS[digit], self.side))
        else:
            image = self.draw(task.data)
        return [user(put(image)), assistant(digit)]

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(str(count) for count in range(1, self.most + 1))

    def draw(self, scene: Scene) -> bytes:
        """Draw dark discs of equal size on light paper, each slightly off its cell's centre."""
        rng = random.Random(scene.seed)
        image = Image.new("L", (self.side, self.side), rng.randint(*PAPER_LEVELS))
        pen = ImageDraw.Draw(image)
        pitch = self.side / self.cells
        radius = 0.36 * pitch
        for cell in scene.cells:
            row, column = divmod(cell, self.cells)
            x, y = (
                (place + 0.5 + rng.uniform(-0.06, 0.06)) * pitch - 0.5 for place in (column, row)
            )
            box = (x - radius, y - radius, x + radius, y + radius)
            pen.ellipse(box, fill=rng.randint(*INK_LEVELS))
        return encode_png(image)
