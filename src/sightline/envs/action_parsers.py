"""Episodes of somebody else's environment: what a model says becomes an action.

A parser is any class with `parse(answer) -> action or None`. `NamedActions` is one for actions that
have names; run files name others as 'module:Class'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from sightline.config.load import load_object
from sightline.envs.protocol import Chat, Outcome
from sightline.errors import ConfigError
from sightline.message import Message

ON_MALFORMED = ("random", "skip", "end")


class ActionParser(Protocol):
    """Reads an action from an answer."""

    def parse(self, answer: Message) -> Any | None:
        """The action; None when the answer is none. An action is never None."""
        ...


@dataclass(frozen=True)
class NamedActions:
    """The whole answer, less space around it, is the name of an action."""

    actions: Mapping[str, Any]

    def parse(self, answer: Message) -> Any | None:
        return self.actions.get(answer.text.strip())


def build_parser(
    actions: str | Sequence[str] | Mapping[str, Any] | None, num_actions: int, where: str
) -> ActionParser:
    """The parser that a run file means by `actions`.

    A list names the actions 0, 1, 2 and so on; a table gives each name its action; a string is
    the 'module:Class' of a parser; nothing means that the numbers are the names.
    """
    if isinstance(actions, str):
        return _load_parser(actions, where)
    if actions is None:
        if not num_actions:
            raise ConfigError(
                f"{where}: its actions are not a few, and [env.args] actions is not set",
                "name a parser, 'module:Class', with a method parse(answer)",
            )
        actions = [str(number) for number in range(num_actions)]
    if not isinstance(actions, Mapping):
        actions = {name: number for number, name in enumerate(actions)}
    if not actions:
        raise ConfigError(
            f"{where}: no action has a name",
            "name each action once in [env.args] actions",
        )
    return NamedActions(actions)


def _load_parser(path: str, where: str) -> ActionParser:
    make = load_object(path, f"{where}: [env.args] actions")
    try:
        parser = make()
    except TypeError as error:
        raise ConfigError(
            f"{where}: [env.args] actions = {path!r}: {error}",
            "name a class that can be made without arguments",
        ) from error
    if not callable(getattr(parser, "parse", None)):
        raise ConfigError(f"{where}: {path!r} has no method parse", "give it parse(answer)")
    return cast(ActionParser, parser)


class Episode(Protocol):
    """One game of somebody else's environment, while it is played."""

    @property
    def is_over(self) -> bool: ...

    async def observe(self, chat: Chat, is_first: bool) -> Message:
        """What the model is shown next."""
        ...

    async def step(self, action: Any) -> float:
        """Does the action; returns what it earned."""
        ...

    async def draw_action(self, rng: random.Random) -> Any:
        """Any action that the environment takes."""
        ...


@dataclass(frozen=True)
class EpisodeRules:
    """How answers become actions, and what follows from one that is none."""

    parser: ActionParser
    on_malformed: str
    """`random`: any action in its place; `skip`: nothing is done; `end`: the episode ends."""
    malformed_penalty: float
    max_turns: int

    def __post_init__(self) -> None:
        if self.on_malformed not in ON_MALFORMED:
            raise ConfigError(
                f"[env.args] on_malformed = {self.on_malformed!r}",
                f"use one of {', '.join(map(repr, ON_MALFORMED))}",
            )

    async def play(self, episode: Episode, chat: Chat, **ending: Callable[[], float]) -> Outcome:
        """Plays to the end; `ending` are further parts of the outcome, read when it is over."""
        total, num_malformed, gave_up = 0.0, 0, False
        per_turn: list[float] = []
        while not (episode.is_over or gave_up) and len(per_turn) < self.max_turns:
            answer = await chat.send([await episode.observe(chat, is_first=not per_turn)])
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
