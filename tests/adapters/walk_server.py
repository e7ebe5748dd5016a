"""A grid world behind a real OpenEnv server: walk right until the wall. Started as a program."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import uvicorn
from grid_walk import GridWalk, Maze
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

GRID = GridWalk(cells=4, side=64)


class Move(Action):
    direction: str


class Picture(Observation):
    image: str
    note: str = ""


class Walk(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.maze, self.at, self.num_steps = Maze((0, 0), (0, 3), frozenset()), (0, 0), 0

    def reset(self, seed: int | None = None, episode_id: Any = None, **options: Any) -> Picture:
        rng = random.Random(seed)
        self.maze = Maze((rng.randrange(4), 0), (rng.randrange(4), 3), frozenset())
        self.at, self.num_steps = self.maze.start, 0
        return self._see(0.0)

    def step(self, action: Move, timeout_s: Any = None, **options: Any) -> Picture:
        self.num_steps += 1
        self.at = GRID.walk(self.maze, self.at, action.direction)
        return self._see(1.0 if self.at[1] == 3 else 0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)

    def _see(self, reward: float) -> Picture:
        image = base64.b64encode(GRID.draw(self.maze, self.at)).decode()
        done = self.at[1] == 3 or self.num_steps >= 12
        return Picture(image=image, note="go", reward=reward, done=done)


if __name__ == "__main__":
    app = create_fastapi_app(Walk, Move, Picture, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
