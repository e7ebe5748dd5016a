"""Gymnasium: any environment with `render_mode="rgb_array"`, a picture every turn.

An environment has a thread of its own for as long as its episode lasts: some renderers may be
used only from the thread that made them, and the worker's other rollouts go on meanwhile. Pictures
are drawn one at a time: pygame, which draws most of Gymnasium's own environments, keeps the corners
of a polygon in one place for the whole process, and two threads would draw each other's.
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
from sightline.envs.extras import import_extra
from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.envs.threads import SerialThread
from sightline.errors import ConfigError
from sightline.media import MediaRef
from sightline.message import Message, user

RENDER_MODE = "rgb_array"


@cache
def get_render_lock() -> threading.Lock:
    """Held while an environment draws, or closes what it draws with, which pygame does for all."""
    return threading.Lock()


@dataclass(eq=False)
class GymnasiumEnvironment(Environment):
    """The environment that Gymnasium knows as `id`; `module` registers it, where that is needed."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    actions: str | Sequence[str] | Mapping[str, Any] | None = None
    on_malformed: str = "random"
    malformed_penalty: float = 0.1
    max_turns: int = 200
    longest_side: int = 0
    """Pixels that pictures are scaled down to; 0 leaves them."""
    hint: str = ""
    """Text beside the first picture."""
    seed: int = 0

    def __post_init__(self) -> None:
        gymnasium = import_extra("gymnasium", "gymnasium")
        self.name = f"gymnasium:{self.id}"
        self.render_lock = get_render_lock()
        if self.module:
            importlib.import_module(self.module)  # registers what it brings
        self.make: Callable[[], Any] = lambda: gymnasium.make(
            self.id, render_mode=RENDER_MODE, **self.kwargs
        )
        num_actions = self._probe(gymnasium.error.Error)
        self.rules = EpisodeRules(
            build_parser(self.actions, num_actions, self.name),
            self.on_malformed,
            self.malformed_penalty,
            self.max_turns,
        )

    def _probe(self, error_type: type[Exception]) -> int:
        """Draws one frame, here and now; returns how many actions there are, 0 when not a few.

        Renderers load their libraries with the first frame, which threads must not do at once.
        """
        try:
            # What Gymnasium warns of here, a missing render mode, is an error of ours below.
            with warnings.catch_warnings(action="ignore"):
                probe = self.make()
                probe.reset(seed=0)
                with self.render_lock:
                    frame = probe.render()
                    probe.close()
        except (error_type, TypeError) as error:
            raise ConfigError(
                f"{self.name}: {error}",
                "check [env.args] id and kwargs, name the module that registers it as `module`, "
                "and install what it draws with",
            ) from error
        if getattr(frame, "ndim", 0) != 3:
            raise ConfigError(
                f"{self.name} draws no picture, and pictures are what is shown",
                f"choose an environment with render mode {RENDER_MODE!r}",
            )
        return int(getattr(probe.action_space, "n", 0))

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
            # Not awaited: a step that hangs comes before it, and would hold up a cancelled rollout.
            game.thread.end(game.close)

    def scale(self, frame: Any) -> Image.Image:
        """A frame as a picture, no larger than `longest_side`."""
        image = Image.fromarray(frame)
        scale = self.longest_side / max(image.size)
        if not self.longest_side or scale >= 1:
            return image
        width, height = (max(1, round(side * scale)) for side in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)


@dataclass
class _Episode:
    """One episode. Everything that touches the environment runs in its thread."""

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
