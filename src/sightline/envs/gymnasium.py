"""Adapter for Gymnasium environments with `render_mode="rgb_array"`: one picture per turn.

Each episode runs in its own thread, because some renderers work only in the thread that created
them, and other rollouts must not wait. One lock serializes all drawing, because pygame, which most
Gymnasium environments use, keeps a polygon's corners in one buffer per process.
"""

from __future__ import annotations

import importlib
import random
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from PIL import Image

from sightline.envs.actions import EpisodeRules, build_parser
from sightline.envs.protocol import Chat, Environment, Outcome, Task, import_extra
from sightline.envs.threads import SerialThread
from sightline.errors import ConfigError
from sightline.media import MediaRef
from sightline.message import Message, user

RENDER_MODE = "rgb_array"


@cache
def get_render_lock() -> threading.Lock:
    """Return the process-wide lock for drawing and for closing renderers."""
    return threading.Lock()


@dataclass(eq=False)
class GymnasiumEnvironment(Environment):
    """The Gymnasium environment `id`. If set, `module` is imported first, to register it."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    actions: str | Sequence[str] | Mapping[str, Any] | None = None
    on_malformed: str = "random"
    malformed_penalty: float = 0.1
    max_turns: int = 200
    longest_side: int = 0
    """Maximum side length in pixels. Larger pictures are scaled down; 0 for no limit."""
    hint: str = ""
    """Text before the first picture."""
    seed: int = 0

    def __post_init__(self) -> None:
        gymnasium = import_extra("gymnasium", "gymnasium")
        self.name = f"gymnasium:{self.id}"
        self.render_lock = get_render_lock()
        if self.module:
            importlib.import_module(self.module)
        self.make: Callable[[], Any] = lambda: gymnasium.make(
            self.id, render_mode=RENDER_MODE, **self.kwargs
        )
        num_actions = self._draw_first_frame(gymnasium.error.Error)
        self.rules = EpisodeRules(
            build_parser(self.actions, num_actions, self.name),
            self.on_malformed,
            self.malformed_penalty,
            self.max_turns,
        )

    def _draw_first_frame(self, error_type: type[Exception]) -> int:
        """Draw one frame and return the number of actions, or 0 if they are not discrete.

        Renderers load their libraries for the first frame, which is not thread-safe.
        """
        try:
            # Gymnasium only warns about a missing render mode, which is an error below.
            with warnings.catch_warnings(action="ignore"):
                env = self.make()
                env.reset(seed=0)
                with self.render_lock:
                    frame = env.render()
                    env.close()
        except (error_type, TypeError) as error:
            raise ConfigError(
                f"{self.name}: {error}",
                "check [env.args] id and kwargs, set module to the module that registers it, and "
                "install its rendering library",
            ) from error
        if getattr(frame, "ndim", 0) != 3:
            raise ConfigError(
                f"{self.name} does not draw pictures",
                f"choose an environment with render mode {RENDER_MODE!r}",
            )
        return int(getattr(env.action_space, "n", 0))

    def task(self, index: int, split: str) -> Task:
        return Task(index, split, self.task_rng(index, split).getrandbits(31))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        game = _Episode(SerialThread("gymnasium"), self)
        try:
            await game.thread.run(lambda: game.start(task.data))
            outcome = await self.rules.play(
                game, chat, terminated=lambda: game.terminated, over=lambda: game.is_over
            )
            await game.thread.run(game.close)
            return outcome
        finally:
            # Not awaited: a step that hangs would block a cancelled rollout.
            game.thread.end(game.close)

    def scale(self, frame: Any) -> Image.Image:
        """Return a frame as a picture, no larger than `longest_side`."""
        image = Image.fromarray(frame)
        scale = self.longest_side / max(image.size)
        if not self.longest_side or scale >= 1:
            return image
        width, height = (max(1, round(side * scale)) for side in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)


@dataclass
class _Episode:
    """One episode. All calls to the environment run in `thread`."""

    thread: SerialThread
    owner: GymnasiumEnvironment
    env: Any = None
    terminated: bool = False
    truncated: bool = False

    def start(self, seed: int) -> None:
        self.env = self.owner.make()
        self.env.reset(seed=seed)
        self.env.action_space.seed(seed)

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated

    async def observe(self, chat: Chat, is_first: bool) -> Message:
        def draw() -> MediaRef:
            with self.owner.render_lock:
                frame = self.env.render()
            return chat.put(self.owner.scale(frame))

        image = await self.thread.run(draw)
        hint = [self.owner.hint] if self.owner.hint and is_first else []
        return user(*hint, image)

    async def draw_action(self, rng: random.Random) -> Any:
        def draw() -> Any:
            self.env.action_space.seed(rng.getrandbits(31))
            return self.env.action_space.sample()

        return await self.thread.run(draw)

    async def step(self, action: Any) -> float:
        def step() -> float:
            _, reward, self.terminated, self.truncated, _ = self.env.step(action)
            return float(reward)

        return await self.thread.run(step)

    def close(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            with self.owner.render_lock:
                env.close()


ENVIRONMENT = GymnasiumEnvironment
