"""Action parsers, and the rules by which adapters run an episode.

A parser is any class with a `parse(answer)` method. `NamedActions` parses actions by name. To use
another parser, a run file sets 'module:Class'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from sightline.config.load import load_object
from sightline.envs.protocol import Chat, Outcome
from sightline.errors import ConfigError, RolloutTruncated
from sightline.message import Message

ON_MALFORMED = ("random", "skip", "end")


class ActionParser(Protocol):
    """Reads an action from an answer."""

    def parse(self, answer: Message) -> Any | None:
        """Return the action, or None if the answer is not an action."""


@dataclass(frozen=True)
class NamedActions:
    """Parses an answer that consists of an action's name, ignoring surrounding white space."""

    actions: Mapping[str, Any]

    def parse(self, answer: Message) -> Any | None:
        return self.actions.get(answer.text.strip())


def build_parser(
    actions: str | Sequence[str] | Mapping[str, Any] | None, num_actions: int, where: str
) -> ActionParser:
    """Return the parser for a run file's `actions` setting.

    A list names the actions 0, 1, 2 and so on. A table maps names to actions. A string is the
    'module:Class' of a parser. By default, an action's name is its number.
    """
    if isinstance(actions, str):
        return _load_parser(actions, where)
    if actions is None:
        if not num_actions:
            raise ConfigError(
                f"{where}: its action space is not discrete, and [env.args] actions is not set",
                "set it to a parser, 'module:Class', with a method parse(answer)",
            )
        actions = [str(number) for number in range(num_actions)]
    if not isinstance(actions, Mapping):
        actions = {name: number for number, name in enumerate(actions)}
    if not actions:
        raise ConfigError(f"{where}: [env.args] actions is empty", "list each action once")
    return NamedActions(actions)


def _load_parser(path: str, where: str) -> ActionParser:
    make = load_object(path, f"{where}: [env.args] actions")
    try:
        parser = make()
    except TypeError as error:
        raise ConfigError(
            f"{where}: [env.args] actions = {path!r}: {error}",
            "set it to a class whose constructor takes no arguments",
        ) from error
    if not callable(getattr(parser, "parse", None)):
        raise ConfigError(f"{where}: {path!r} has no method parse", "add parse(self, answer)")
    return cast(ActionParser, parser)


class Episode(Protocol):
    """One episode of another library's environment."""

    @property
    def is_over(self) -> bool: ...

    async def observe(self, chat: Chat, is_first: bool) -> Message:
        """Return the message that shows the current state."""

    async def step(self, action: Any) -> float:
        """Perform the action and return its reward."""

    async def draw_action(self, rng: random.Random) -> Any:
        """Return a random valid action."""


@dataclass(frozen=True)
class EpisodeRules:
    """Rules for parsing answers and for answers that are not an action."""

    parser: ActionParser
    on_malformed: str
    """`random`: take a random action; `skip`: do nothing; `end`: end the episode."""
    malformed_penalty: float
    max_turns: int

    def __post_init__(self) -> None:
        if self.on_malformed not in ON_MALFORMED:
            raise ConfigError(
                f"unknown [env.args] on_malformed = {self.on_malformed!r}",
                f"use one of {', '.join(map(repr, ON_MALFORMED))}",
            )

    async def play(self, episode: Episode, chat: Chat, **ending: Callable[[], float]) -> Outcome:
        """Play until the episode ends or the rollout is truncated, and return the outcome.

        `ending` has further parts of the outcome. Its functions are called at the end.
        """
        total, num_malformed, gave_up = 0.0, 0, False
        per_turn: list[float] = []
        while not (episode.is_over or gave_up) and len(per_turn) < self.max_turns:
            try:
                answer = await chat.send([await episode.observe(chat, is_first=not per_turn)])
            except RolloutTruncated:
                break
            action = self.parser.parse(answer)
            malformed = action is None
            num_malformed += malformed
            gave_up = malformed and self.on_malformed == "end"
            if malformed and self.on_malformed == "random":
                action = await episode.draw_action(chat.rng)
            earned = 0.0 if action is None else await episode.step(action)
            total += earned
            per_turn.append(earned - self.malformed_penalty * malformed)
        turns = len(per_turn)
        return Outcome(
            reward=sum(per_turn),
            parts={
                "return": total,
                **{name: float(read()) for name, read in ending.items()},
                "turns": float(turns),
                "malformed": num_malformed / turns if turns else 0.0,
            },
            per_turn=per_turn,
        )
