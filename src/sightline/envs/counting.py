"""counting: say how many blobs the picture shows, in one turn and one digit."""

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
    """What a task shows: cells that hold a blob, and the seed of their small differences."""

    cells: tuple[int, ...]
    seed: int


class Counting(Environment):
    name = "counting"

    def __init__(
        self,
        most: int = 5,
        side: int = 32,
        cells: int = 3,
        malformed_penalty: float = 0.3,
        spelled_share: float = 0.75,
        seed: int = 0,
    ) -> None:
        if not 1 <= most <= min(9, cells * cells):
            raise ConfigError(
                f"counting: most = {most} on {cells} x {cells} cells",
                "count to 9 at the most, and no further than there are cells",
            )
        if side < 4 * cells:
            raise ConfigError(
                f"counting: {cells} cells in {side} pixels", "give a cell 4 pixels or more"
            )
        self.most = most
        self.side = side
        self.cells = cells
        self.malformed_penalty = malformed_penalty
        self.spelled_share = spelled_share
        self.seed = seed

    def task(self, index: int, split: str) -> Task:
        rng = random.Random(f"{self.seed}:{split}:{index}")
        count = rng.randint(1, self.most)
        cells = rng.sample(range(self.cells * self.cells), count)
        return Task(index, split, Scene(tuple(sorted(cells)), rng.getrandbits(32)))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        said = (await chat.send([user(chat.put(self.draw(task.data)))])).text
        right = said == str(len(task.data.cells))
        malformed = said not in self.answers
        return Outcome(
            reward=float(right) - self.malformed_penalty * malformed,
            parts={"right": float(right), "malformed": float(malformed)},
        )

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """The format, without the counting: the answer to a picture of blobs is a random digit.

        A share of the conversations shows a picture of the digit itself: that teaches to answer
        with what is shown.
        """
        digit = rng.choice(self.answers)
        if rng.random() < self.spelled_share:
            shown = encode_png(draw_glyph(DIGITS[digit], self.side))
        else:
            shown = self.draw(task.data)
        return [user(put(shown)), assistant(digit)]

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(str(count) for count in range(1, self.most + 1))

    def draw(self, scene: Scene) -> bytes:
        """Dark discs of a size on light paper, each a little off the middle of its cell."""
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


ENVIRONMENT = Counting
