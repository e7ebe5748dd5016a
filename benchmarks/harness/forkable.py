"""color_codeword turn by turn, so that it can fork. Its rollouts earn one reward at their end."""

from __future__ import annotations

from sightline.envs.color_codeword import COLORS, ColorCodeword
from sightline.envs.forks import TurnEnvironment
from sightline.envs.protocol import Chat, Messages, Task
from sightline.message import AssistantMessage


class ForkableCodeword(TurnEnvironment):
    name = "color_codeword"

    def __init__(self) -> None:
        self.inner = ColorCodeword()

    def task(self, index: int, split: str) -> Task:
        return self.inner.task(index, split)

    def start(self, task: Task, chat: Chat) -> tuple[list[Task], Messages]:
        """The state holds the task once for each turn that has been shown."""
        return [task], [self.inner._show(task, 0, chat.put)]

    def step(self, state: list[Task], answer: AssistantMessage, chat: Chat) -> Messages | float:
        task, turn = state[0], len(state)
        if turn < self.inner.turns:
            state.append(task)
            return [self.inner._show(task, turn, chat.put)]
        truth = "".join(letter for letter, _ in task.data)
        is_malformed = len(answer.text) != len(truth) or not COLORS.keys() >= set(answer.text)
        num_right = sum(a == b for a, b in zip(answer.text, truth, strict=False))
        return num_right / len(truth) - self.inner.malformed_penalty * is_malformed
