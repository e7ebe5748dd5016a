"""screenshots: a new drawn page every turn, to measure long rollouts. It has no task to learn.

A page has blocks, lines of text and a patch of noise in place of a photograph. Its PNG is about
as large as a real page's (over 50 KB at 1280x720).
"""

from __future__ import annotations

import io
import random
from functools import cached_property

from PIL import Image, ImageDraw, ImageFont

from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.message import user

PAPER, INK = 250, 20
NUM_BLOCKS = 40
NUM_LINES = 40
NUM_TEXTS = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCREENSHOTS = "sightline.bench.harness.screenshots:Screenshots"
"""The name of the environment in a run file."""


class Screenshots(Environment):
    name = "screenshots"

    def __init__(
        self,
        turns: int = 50,
        width: int = 1280,
        height: int = 720,
        shares_first: bool = False,
    ) -> None:
        """With `shares_first`, the rollouts of a group start on the same page."""
        self.turns, self.width, self.height = turns, width, height
        self.shares_first = shares_first

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        rng = random.Random(task.index) if self.shares_first else chat.rng
        for turn in range(self.turns):
            await chat.send([user(f"page {turn}", chat.put(self.draw(rng)))])
            rng = chat.rng
        return Outcome(reward=chat.rng.random())

    def draw(self, rng: random.Random) -> bytes:
        """Return a page as PNG, in 256 colours, which is several times cheaper than RGB."""
        width, height = self.width, self.height
        page = Image.new("P", (width, height), PAPER)
        page.putpalette(self._palette)
        pen = ImageDraw.Draw(page)
        for _ in range(NUM_BLOCKS):
            x, y = rng.randrange(width), rng.randrange(height)
            right, bottom = x + rng.randint(1, width // 6), y + rng.randint(1, height // 8)
            pen.rectangle((x, y, right, bottom), fill=rng.randrange(256))
        for line in range(NUM_LINES):
            place = (rng.randrange(width // 2), line * height // NUM_LINES)
            page.paste(INK, place, rng.choice(self._texts))
        size = (width // 5, height // 4)
        photo = Image.frombytes("P", size, rng.randbytes(size[0] * size[1]))
        page.paste(photo, (rng.randrange(width - size[0]), rng.randrange(height - size[1])))
        file = io.BytesIO()
        page.save(file, "PNG", compress_level=1)
        return file.getvalue()

    @cached_property
    def _palette(self) -> bytes:
        return bytes(value % 256 for i in range(256) for value in (i, 7 * i, 31 * i))

    @cached_property
    def _texts(self) -> list[Image.Image]:
        """Masks of text lines, drawn once, because letters are the slowest part of a page."""
        rng, font = random.Random(0), ImageFont.load_default()
        texts = []
        for _ in range(NUM_TEXTS):
            words = ("".join(rng.choices(LETTERS, k=rng.randint(2, 9))) for _ in range(14))
            mask = Image.new("L", (max(self.width // 2, 1), 14))
            ImageDraw.Draw(mask).text((0, 0), " ".join(words), fill=255, font=font)
            texts.append(mask)
        return texts
