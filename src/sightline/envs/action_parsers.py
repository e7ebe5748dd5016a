"""From what a model says to an action of somebody else's environment.

A parser is any class with `parse(said) -> action or None`. `NamedActions` is one for actions that have
names; run files name others as 'module:Class'.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from sightline.errors import ConfigError
from sightline.message import Message

ON_MALFORMED = ("random", "skip", "end")


class ActionParser(Protocol):
    def parse(self, said: Message) -> Any | None:
        """The action; None when the answer is none. An action is never None."""
        ...


@dataclass(frozen=True)
class NamedActions:
    """The whole answer, less space around it, is the name of an action."""

    actions: Mapping[str, Any]

    def parse(self, said: Message) -> Any | None:
        return self.actions.get(said.text.strip())


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
                "name a parser, 'module:Class', with a method parse(said)",
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
    module_name, _, class_name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)()
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: [env.args] actions = {path!r}: {error}",
            "name a class that can be imported and made without arguments: 'module:Class'",
        ) from error
    if not callable(getattr(made, "parse", None)):
        raise ConfigError(f"{where}: {path!r} has no method parse", "give it parse(said)")
    return cast(ActionParser, made)


def check_on_malformed(value: str, where: str) -> str:
    if value not in ON_MALFORMED:
        raise ConfigError(
            f"{where}: on_malformed = {value!r}",
            f"use one of {', '.join(map(repr, ON_MALFORMED))}",
        )
    return value
