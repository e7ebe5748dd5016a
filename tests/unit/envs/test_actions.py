from __future__ import annotations

import asyncio
from typing import Any

from sightline.envs.actions import EpisodeRules, NamedActions
from sightline.errors import RolloutTruncated
from sightline.message import Message, assistant, user


class Corridor:
    """An episode that pays 2 for every step and never ends."""

    is_over = False

    async def observe(self, chat: Any, is_first: bool) -> Message:
        return user("go on")

    async def step(self, action: Any) -> float:
        return 2.0

    async def draw_action(self, rng: Any) -> Any:
        raise AssertionError("every answer is an action")


class ShortChat:
    """A chat with room for three answers."""

    num_calls = 0

    async def send(self, new_messages: Any) -> Message:
        if self.num_calls == 3:
            raise RolloutTruncated("no room", "show less")
        self.num_calls += 1
        return assistant("on")


def test_truncated_episode_keeps_its_reward() -> None:
    rules = EpisodeRules(NamedActions({"on": 1}), "skip", 0.1, max_turns=9)
    chat: Any = ShortChat()
    outcome = asyncio.run(rules.play(Corridor(), chat))
    assert outcome.reward == outcome.parts["return"] == 6.0 and outcome.parts["turns"] == 3
    assert outcome.per_turn == [2.0, 2.0, 2.0], "one for each call that was answered"
