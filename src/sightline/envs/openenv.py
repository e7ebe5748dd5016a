"""Adapter for environments behind an OpenEnv server, through OpenEnv's generic client.

Only the server needs the environment's package. Workers need `openenv`. An observation is a dict in
which one field may hold a picture (base64 or a data URL) and another one text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sightline.envs.actions import EpisodeRules, build_parser
from sightline.envs.protocol import Chat, Environment, Outcome, Task, import_extra
from sightline.errors import ConfigError, EnvironmentFailed
from sightline.media import read_data_url
from sightline.message import Message, user


@dataclass(eq=False)
class OpenEnvEnvironment(Environment):
    """The environment of the server at `base_url`. `reset` has the arguments for its reset."""

    name = "openenv"

    base_url: str
    actions: str | Sequence[str] | Mapping[str, Any]
    image_field: str = "image"
    """Observation field that holds a picture. Empty for none."""
    text_field: str = ""
    """Observation field that holds text. Empty for none."""
    on_malformed: str = "skip"
    malformed_penalty: float = 0.1
    max_turns: int = 50
    reset: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        client = import_extra("openenv.core.generic_client", "openenv")
        if not (self.image_field or self.text_field):
            raise ConfigError(
                "openenv: [env.args] image_field and text_field are both empty",
                "set at least one of them",
            )
        self.shows_media = bool(self.image_field)
        if self.on_malformed == "random" and (isinstance(self.actions, str) or not self.actions):
            raise ConfigError(
                "openenv: on_malformed = 'random' needs a list of actions",
                "give [env.args] actions as a table, or choose 'skip' or 'end'",
            )
        parser = build_parser(self.actions, 0, self.name)
        self.choices = list(getattr(parser, "actions", {}).values())
        self.rules = EpisodeRules(parser, self.on_malformed, self.malformed_penalty, self.max_turns)
        self._client = client.GenericEnvClient

    def task(self, index: int, split: str) -> Task:
        return Task(index, split, self.task_rng(index, split).getrandbits(31))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        async with self._client(base_url=self.base_url) as client:
            episode = _Episode(self, client, await client.reset(seed=task.data, **self.reset))
            return await self.rules.play(episode, chat, done=lambda: episode.is_over)

    def show(self, observation: Mapping[str, Any], chat: Chat) -> Message:
        """Convert an observation to the next message."""
        parts: list[Any] = []
        if self.text_field:
            parts.append(str(self._field(observation, self.text_field)))
        if self.image_field:
            image = str(self._field(observation, self.image_field))
            url = image if image.startswith("data:") else f"data:image/*;base64,{image}"
            parts.append(chat.put(read_data_url(url)))
        return user(*parts)

    def _field(self, observation: Mapping[str, Any], name: str) -> Any:
        if name not in observation:
            raise EnvironmentFailed(
                f"an observation of {self.base_url} has no field {name!r}. It has "
                f"{', '.join(map(repr, sorted(observation))) or 'none'}",
                "set [env.args] image_field or text_field to one of these",
            )
        return observation[name]


@dataclass
class _Episode:
    owner: OpenEnvEnvironment
    client: Any
    result: Any

    @property
    def is_over(self) -> bool:
        return bool(self.result.done)

    async def observe(self, chat: Chat, is_first: bool) -> Message:
        return self.owner.show(self.result.observation, chat)

    async def step(self, action: Any) -> float:
        self.result = await self.client.step(action)
        return float(self.result.reward or 0.0)

    async def draw_action(self, rng: random.Random) -> Any:
        return rng.choice(self.owner.choices)


ENVIRONMENT = OpenEnvEnvironment
