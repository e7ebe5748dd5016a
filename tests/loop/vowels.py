"""vowels: say as many vowels as possible.

A random model says some, so every chat format has a signal.
"""

from __future__ import annotations

import random
from typing import Any

from PIL import Image

from sightline.envs import Chat, Environment, Outcome, Task
from sightline.message import Message, assistant, user

VOWELS = "aeiouAEIOU"


class Vowels(Environment):
    name = "vowels"

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    def task(self, index: int, split: str) -> Task:
        return Task(index, split, index)

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        earned = []
        for turn in range(self.turns):
            answer = await chat.send([self._question(task, turn, chat.put)])
            # Some formats open a turn with reasoning, and a short one ends in the middle of it.
            spoken = (answer.reasoning or "") + answer.text
            earned.append(sum(letter in VOWELS for letter in spoken) / max(len(spoken), 1))
        return Outcome(sum(earned) / self.turns, per_turn=earned)

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        talk: list[Message] = []
        for turn in range(self.turns):
            spoken = "".join(rng.choices(VOWELS, k=4))
            talk += [self._question(task, turn, put), assistant(spoken)]
        return talk

    def _question(self, task: Task, turn: int, put: Any) -> Message:
        prompt = f"vowels {task.index + turn}?"
        shade = (37 * task.index + 80 * turn) % 256
        return user(prompt, put(Image.new("RGB", (32, 64), (shade, 90, 255 - shade))))
