"""frame_order: a video shows several colours in turn. Name them in order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

from sightline.envs.drawing import encode_png
from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.errors import ConfigError
from sightline.message import Message, VideoPart, assistant, user, video

COLORS = {"R": (220, 40, 40), "G": (40, 200, 60), "B": (50, 70, 220), "Y": (225, 210, 50)}


@dataclass(frozen=True)
class Film:
    """The video of a task: the letters of its colours in order, and the seed of their shades."""

    letters: str
    seed: int


@dataclass(eq=False)
class FrameOrder(Environment):
    """Videos of the same colours in different orders. A model that ignores the order of frames
    learns nothing about the answer."""

    name = "frame_order"

    colors: int = 3
    side: int = 32
    seconds_per_frame: float = 0.5
    frames_per_color: int = 2
    malformed_penalty: float = 0.3
    plain_fraction: float = 0.5
    """Fraction of demonstrations that show a single colour."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.colors <= len(COLORS):
            raise ConfigError(
                f"frame_order: colors = {self.colors} is not allowed", f"set 2 to {len(COLORS)}"
            )

    @property
    def letters(self) -> str:
        return "".join(COLORS)[: self.colors]

    def task(self, index: int, split: str) -> Task:
        rng = self.task_rng(index, split)
        letters = "".join(rng.sample(self.letters, self.colors))
        return Task(index, split, Film(letters, rng.getrandbits(32)))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        answer = (await chat.send([user(self.show(task.data, chat.put))])).text
        wanted = task.data.letters
        malformed = sorted(answer) != sorted(wanted)
        places = sum(a == b for a, b in zip(answer, wanted, strict=not malformed))
        share = 0.0 if malformed else places / len(wanted)
        return Outcome(
            reward=share - self.malformed_penalty * malformed,
            parts={"right": float(answer == wanted), "malformed": float(malformed)},
        )

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """Teach the colours and the format but not the order. The answer to a video of one colour
        repeats its letter. The answer to other videos has the letters in random order."""
        letters = "".join(rng.sample(self.letters, self.colors))
        if rng.random() < self.plain_fraction:
            letters = letters[0] * self.colors
            return [user(self.show(Film(letters, task.data.seed), put)), assistant(letters)]
        return [user(self.show(task.data, put)), assistant(letters)]

    def show(self, film: Film, put: Any) -> VideoPart:
        """Return the video as frames with timestamps."""
        rng = random.Random(film.seed)
        frames = []
        for letter in film.letters:
            shade = tuple(value + rng.randint(-20, 20) for value in COLORS[letter])
            picture = put(encode_png(Image.new("RGB", (self.side, self.side), shade)))
            frames += [picture] * self.frames_per_color
        return video([(frame, i * self.seconds_per_frame) for i, frame in enumerate(frames)])
