"""OpenEnv: an environment behind an OpenEnv server, spoken to by OpenEnv's own generic client.

The server runs anywhere and has the environment's package; here only `openenv` is needed. An
observation is a dict: one field of it may hold a picture (base64 or a data URL), one a text.
"""

from __future__ import annotations

import base64
import binascii
import random
from collections.abc import Mapping, Sequence
from typing import Any

from sightline.envs.action_parsers import build_parser, check_on_malformed
from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.errors import ConfigError, EnvironmentFailed
from sightline.message import Message, user


class OpenEnvEnvironment(Environment):
    def __init__(
        self,
        base_url: str,
        actions: str | Sequence[str] | Mapping[str, Any],
        image_field: str = "image",
        text_field: str = "",
        on_malformed: str = "skip",
        malformed_penalty: float = 0.1,
        max_turns: int = 50,
        reset: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"[env] openenv: there is no module {error.name!r} here",
                "pip install 'sightline-rl[openenv]' where the workers run",
            ) from error
        if not (image_field or text_field):
            raise ConfigError("openenv: nothing is shown", "set image_field or text_field")
        self.name = "openenv"
        self.shows_images = bool(image_field)
        self.base_url = base_url
        self.image_field = image_field
        self.text_field = text_field
        self.on_malformed = check_on_malformed(on_malformed, self.name)
        if on_malformed == "random" and (isinstance(actions, str) or not actions):
            raise ConfigError(
                "openenv: on_malformed = 'random' with actions that have no list",
                "give [env.args] actions as a table, or choose 'skip' or 'end'",
            )
        self.malformed_penalty = malformed_penalty
        self.max_turns = max_turns
        self.reset = reset or {}
        self.seed = seed
        self.parser = build_parser(actions, 0, self.name)
        self._choices = list(getattr(self.parser, "actions", {}).values())
        self._client = GenericEnvClient

    def task(self, index: int, split: str) -> Task:
        return Task(index, split, random.Random(f"{self.seed}:{split}:{index}").getrandbits(31))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        async with self._client(base_url=self.base_url) as client:
            result = await client.reset(seed=task.data, **self.reset)
            per_turn: list[float] = []
            total, num_malformed = 0.0, 0
            while not result.done and len(per_turn) < self.max_turns:
                said = await chat.send([self._show(result.observation, chat)])
                action = self.parser.parse(said)
                malformed = action is None
                num_malformed += malformed
                per_turn.append(-self.malformed_penalty * malformed)
                if malformed and self.on_malformed == "end":
                    break
                if malformed and self.on_malformed == "random":
                    action = chat.rng.choice(self._choices)
                if action is not None:
                    result = await client.step(action)
                    total += float(result.reward or 0.0)
                    per_turn[-1] += float(result.reward or 0.0)
        turns = len(per_turn)
        return Outcome(
            reward=sum(per_turn),
            parts={
                "return": total,
                "done": float(result.done),
                "turns": float(turns),
                "malformed": num_malformed / turns if turns else 0.0,
            },
            per_turn=per_turn,
        )

    def _show(self, observation: Mapping[str, Any], chat: Chat) -> Message:
        parts: list[Any] = []
        if self.text_field:
            parts.append(str(self._field(observation, self.text_field)))
        if self.image_field:
            parts.append(chat.put(decode_image(self._field(observation, self.image_field))))
        return user(*parts)

    def _field(self, observation: Mapping[str, Any], name: str) -> Any:
        if name not in observation:
            raise EnvironmentFailed(
                f"an observation of {self.base_url} has no field {name!r}, but "
                f"{', '.join(map(repr, sorted(observation))) or 'none'}",
                "name one of these in [env.args] image_field or text_field",
            )
        return observation[name]


def decode_image(value: Any) -> bytes:
    """The bytes of a picture in an observation: base64 text, bare or as a data URL."""
    if not isinstance(value, str):
        raise EnvironmentFailed(
            f"a picture of an observation is a {type(value).__name__}",
            "send the file of the image in base64, or a data URL",
        )
    text = value.partition(";base64,")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EnvironmentFailed(
            f"a picture of an observation is not base64: {error}",
            "send the file of the image in base64, or a data URL",
        ) from error


ENVIRONMENT = OpenEnvEnvironment
