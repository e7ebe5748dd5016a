"""A game runs in its own thread and does not block the worker's loop.

A stand-in replaces the package. tests/adapters tests the adapter with the package itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.rollout.test_many import playing
from unit.rollout.test_timeout import until

from sightline.envs.gymnasium import GymnasiumEnvironment
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.wire.control import RolloutRequest

PIXELS = np.zeros((48, 64, 3), np.uint8)


class Frame(np.ndarray):  # type: ignore[type-arg]
    """A picture that records which thread reads its pixels."""

    seen_by: list[str]

    @property
    def __array_interface__(self) -> Any:  # type: ignore[override]
        self.seen_by.append(threading.current_thread().name)
        return PIXELS.__array_interface__


class Game:
    """An environment of one step, which may hang."""

    def __init__(self, hangs: bool) -> None:
        self.action_space = SimpleNamespace(n=2, seed=lambda seed: None, sample=lambda: 0)
        self.hangs, self.steps, self.goes_on = hangs, threading.Event(), threading.Event()
        self.closed = 0
        self.threads: list[str] = []

    def reset(self, seed: int) -> None:
        self.threads.append(threading.current_thread().name)

    def render(self) -> Frame:
        frame = PIXELS.view(Frame)
        frame.seen_by = self.threads
        return frame

    def step(self, action: Any) -> tuple[Any, ...]:
        self.steps.set()
        if self.hangs:
            self.goes_on.wait(60)
        return None, 1.0, True, False, {}

    def close(self) -> None:
        self.closed += 1


class Made:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
        self.games: list[Game] = []
        package = ModuleType("gymnasium")
        package.make = lambda id, **kwargs: self.add(Game(hangs))  # type: ignore[attr-defined]
        package.error = SimpleNamespace(Error=RuntimeError)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "gymnasium", package)
        self.env = GymnasiumEnvironment("game", longest_side=32)

    def add(self, game: Game) -> Game:
        self.games.append(game)
        return game


def test_images_are_rendered_in_the_environments_thread(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, store: MediaStore
) -> None:
    package = Made(monkeypatch, hangs=False)

    async def main() -> None:
        async with playing(package.env, load_renderer(tiny_model, store), store) as player:
            trace = (await player.play(RolloutRequest("r", "g", 0, "train", 7, 1.0))).trace
            assert not trace.error and trace.rewards["return"] == 1.0

    asyncio.run(main())
    _, game = package.games
    assert set(game.threads) == {"gymnasium"} and len(game.threads) > 1 and game.closed == 1


def test_hanging_step_does_not_block_rollout_cancellation(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, store: MediaStore
) -> None:
    game = Made(monkeypatch, hangs=True)

    async def main() -> None:
        async with playing(game.env, load_renderer(tiny_model, store), store) as player:
            player.timeout_s = player.threads.grace_s = 600.0
            playing_it = asyncio.create_task(
                player.play(RolloutRequest("r", "g", 0, "train", 7, 1.0))
            )
            await until(lambda: len(game.games) == 2 and game.games[1].steps.is_set())
            playing_it.cancel()
            await asyncio.wait_for(asyncio.wait({playing_it}), 30)
            assert player.threads.stuck_s() > 0
            game.games[1].goes_on.set()
            await until(lambda: player.threads.stuck_s() == 0)

    asyncio.run(main())
    assert game.games[-1].closed == 1, "it is closed once the step has come back"
