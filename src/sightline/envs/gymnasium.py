"""Gymnasium: any environment with `render_mode="rgb_array"`, a picture every turn.

An environment has a thread of its own for as long as its episode lasts: some renderers may be
used only from the thread that made them, and the worker's other rollouts go on meanwhile.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from PIL import Image

from sightline.envs.action_parsers import build_parser, check_on_malformed
from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.envs.threads import SerialThread
from sightline.errors import ConfigError
from sightline.message import user

RENDER_MODE = "rgb_array"
T = TypeVar("T")


class GymnasiumEnvironment(Environment):
    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        module: str = "",
        actions: str | Sequence[str] | Mapping[str, Any] | None = None,
        on_malformed: str = "random",
        malformed_penalty: float = 0.1,
        max_turns: int = 200,
        longest_side: int = 0,
        hint: str = "",
        seed: int = 0,
    ) -> None:
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"[env] gymnasium: there is no module {error.name!r} here",
                "pip install 'sightline-rl[gymnasium]' where the workers run",
            ) from error
        self.name = f"gymnasium:{id}"
        self.id = id
        self.kwargs = kwargs or {}
        self.on_malformed = check_on_malformed(on_malformed, self.name)
        self.malformed_penalty = malformed_penalty
        self.max_turns = max_turns
        self.longest_side = longest_side
        self.hint = hint
        self.seed = seed
        if module:
            importlib.import_module(module)  # registers what it brings
        self._make: Callable[[], Any] = lambda: gymnasium.make(
            self.id, render_mode=RENDER_MODE, **self.kwargs
        )
        num_actions = self._probe(gymnasium.error.Error)
        self.parser = build_parser(actions, num_actions, self.name)

    def _probe(self, error_type: type[Exception]) -> int:
        """Draws one frame, here and now; returns how many actions there are, 0 when not a few.

        Renderers load their libraries with the first frame, which threads must not do at once.
        """
        try:
            probe = self._make()
            probe.reset(seed=0)
            frame = probe.render()
            probe.close()
        except error_type as error:
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
        return Task(index, split, random.Random(f"{self.seed}:{split}:{index}").getrandbits(31))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        game = _Episode(SerialThread("gymnasium"))
        try:
            await game.run(lambda: game.start(self._make, task.data))
            outcome = await self._play(game, chat)
            await game.run(game.close)
            return outcome
        finally:
            # Not awaited: a step that hangs comes before it, and would hold up a cancelled rollout.
            game.thread.end(game.close)

    async def _play(self, game: _Episode, chat: Chat) -> Outcome:
        total, num_malformed, gave_up = 0.0, 0, False
        per_turn: list[float] = []
        while not (game.over or gave_up) and len(per_turn) < self.max_turns:
            picture = await game.run(lambda: self._picture(game.frame()))
            parts = [self.hint] if self.hint and not per_turn else []
            said = await chat.send([user(*parts, chat.put(picture))])
            action = self.parser.parse(said)
            malformed = action is None
            num_malformed += malformed
            earned = 0.0
            if malformed and self.on_malformed == "random":
                action = await game.run(lambda: game.any_action(chat.rng))
            gave_up = malformed and self.on_malformed == "end"
            if action is not None:
                earned = await game.run(partial(game.step, action))
            total += earned
            per_turn.append(earned - self.malformed_penalty * malformed)
        turns = len(per_turn)
        return Outcome(
            reward=sum(per_turn),
            parts={
                "return": total,
                "terminated": float(game.terminated),
                "over": float(game.over),
                "turns": float(turns),
                "malformed": num_malformed / turns if turns else 0.0,
            },
            per_turn=per_turn,
        )

    def _picture(self, frame: Any) -> Image.Image:
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
    env: Any = None
    terminated: bool = False
    truncated: bool = False

    async def run(self, work: Callable[[], T]) -> T:
        return await self.thread.run(work)

    def start(self, make: Callable[[], Any], seed: int) -> None:
        self.env = make()
        self.env.reset(seed=seed)
        self.env.action_space.seed(seed)

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    def frame(self) -> Any:
        return self.env.render()

    def any_action(self, rng: random.Random) -> Any:
        self.env.action_space.seed(rng.getrandbits(31))
        return self.env.action_space.sample()

    def step(self, action: Any) -> float:
        _, reward, self.terminated, self.truncated, _ = self.env.step(action)
        return float(reward)

    def close(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            env.close()


ENVIRONMENT = GymnasiumEnvironment
