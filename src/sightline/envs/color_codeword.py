"""The color_codeword task: answer with the letters of all colours shown so far.

Each of three turns shows coloured squares, or names their colours in words. Each colour stands for
a letter, which the model has to learn. Guessing gets one letter in nine right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from PIL import Image

from sightline.envs.drawing import draw_glyph, encode_png
from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.message import Message, assistant, user

# Corners of the colour cube, and one point on a face: a vision tower with random weights
# distinguishes colours by their direction from grey.
COLORS: dict[str, tuple[int, int, int]] = {
    "A": (225, 35, 35),
    "B": (35, 200, 60),
    "C": (40, 70, 225),
    "D": (235, 220, 45),
    "E": (215, 50, 205),
    "F": (45, 210, 220),
    "G": (250, 135, 130),
    "H": (240, 240, 240),
    "I": (20, 20, 20),
}
LETTERS = "".join(COLORS)
# The first letters differ, because a small model reads byte by byte.
_NAMES = "red green blue yellow pink cyan salmon white ebony"
WORDS = dict(zip(LETTERS, _NAMES.split(), strict=True))
"""Colour name of each letter, for models without a vision tower."""
_BITMAPS = (
    "010101111101101 110101110101110 011100100100011 110101101101110 111100110100111 "
    "111100110100100 011100101101011 101101111101101 111010010010111"
)
GLYPHS = dict(zip(LETTERS, _BITMAPS.split(), strict=True))
"""3x5 bitmaps for demonstrations that show letters."""


@dataclass(eq=False)
class ColorCodeword(Environment):
    """Shows `squares` new squares in each of `turns` turns, in one of `shades` per colour."""

    name = "color_codeword"

    squares: int = 1
    turns: int = 3
    side: int = 32
    jitter: int = 12
    shades: int = 4
    malformed_penalty: float = 0.3
    spelled_fraction: float = 0.75
    """Fraction of demonstrations that show letters instead of squares."""
    in_words: bool = False
    """Name the colours in words instead of showing squares, for a text-only model."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.shows_media = not self.in_words

    def task(self, index: int, split: str) -> Task:
        rng = self.task_rng(index, split)
        num = self.squares * self.turns
        squares = [(rng.choice(LETTERS), rng.randrange(self.shades)) for _ in range(num)]
        return Task(index, split, squares)

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        truth = "".join(letter for letter, _ in task.data)
        answer, malformed = "", False
        per_turn: list[float] = []
        for turn in range(self.turns):
            reply = await chat.send([self._show(task, turn, chat.put)])
            # A turn gains from each new correct letter and loses for each one it fails to repeat.
            gain = _num_right(reply.text, truth) - _num_right(answer, truth)
            answer = reply.text
            is_complete = len(answer) == (turn + 1) * self.squares
            malformed = not is_complete or not COLORS.keys() >= set(answer)
            per_turn.append(gain / self.squares - self.malformed_penalty * malformed)
        letters = _num_right(answer, truth) / len(truth)
        return Outcome(
            reward=letters - self.malformed_penalty * malformed,
            parts={
                "letters": letters,
                "exact": float(answer == truth),
                "malformed": float(malformed),
            },
            per_turn=per_turn,
        )

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """Return a conversation that teaches the format but nothing about the colours.

        The letters are random, and later turns repeat them. Some conversations show the letters
        themselves, as pictures or text, which teaches the model to answer with what it sees.
        """
        spelled = rng.random() < self.spelled_fraction
        letters = ""
        messages: list[Message] = []
        for turn in range(self.turns):
            new = "".join(rng.choice(LETTERS) for _ in range(self.squares))
            letters += new
            if spelled and self.in_words:
                message = user(" ".join(new))
            elif spelled:
                message = user(*(put(self.letter(letter)) for letter in new))
            else:
                message = self._show(task, turn, put)
            messages += [message, assistant(letters)]
        return messages

    def _show(self, task: Task, turn: int, put: Any) -> Message:
        first = turn * self.squares
        squares = task.data[first : first + self.squares]
        if self.in_words:
            return user(" ".join(WORDS[letter] for letter, _ in squares))
        return user(*(put(self.square(*square)) for square in squares))

    @cache  # noqa: B019 - an environment lives as long as its process
    def square(self, letter: str, shade: int) -> bytes:
        """Return a letter's square as a PNG. The same shade always gives the same bytes."""
        rng = random.Random(f"{letter}:{shade}")
        near = (c + rng.randint(-self.jitter, self.jitter) for c in COLORS[letter])
        colour = tuple(min(255, max(0, value)) for value in near)
        return encode_png(Image.new("RGB", (self.side, self.side), colour))

    @cache  # noqa: B019
    def letter(self, letter: str) -> bytes:
        """Return a picture of the letter itself, as a PNG."""
        return encode_png(draw_glyph(GLYPHS[letter], self.side))


def _num_right(answer: str, truth: str) -> int:
    return sum(a == b for a, b in zip(answer, truth, strict=False))


ENVIRONMENT = ColorCodeword
