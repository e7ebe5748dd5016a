"""Action formats and parsers: how an answer of the model becomes an action.

An action format declares tools, reads an answer, and writes the messages of a demonstration. An
environment uses one format for a whole conversation.

Adapters of other libraries use a parser, any class with `parse(answer)`. `NamedActions` is the
parser for actions that have names; run files name others as 'module:Class'.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

from sightline.config.load import load_object
from sightline.envs.protocol import Chat, Outcome, Tools
from sightline.errors import ConfigError, RolloutTruncated
from sightline.media import MediaRef
from sightline.message import ImagePart, Message, ToolCall, assistant, text, user

ACTION_FORMATS = ("text", "tool")
ON_MALFORMED = ("random", "skip", "end")


@dataclass(frozen=True)
class ActionField:
    """A value of an action: one of a few words, or an integer from 0 to `num_values - 1`."""

    name: str
    choices: tuple[str, ...] = ()
    num_values: int = 0

    @property
    def schema(self) -> dict[str, Any]:
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "integer", "minimum": 0, "maximum": self.num_values - 1}

    def read(self, value: Any) -> Any:
        """Return the value, or None when it is out of bounds or of another type."""
        if self.choices:
            return value if value in self.choices else None
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return value if is_number and 0 <= value < self.num_values else None


@dataclass(frozen=True)
class TextActions:
    """An action is the whole text of an answer, one word for each field: `U`, `click 40 12`."""

    fields: tuple[ActionField, ...]
    verb: str = ""
    """The first word of every action; empty for none."""
    tools: ClassVar[Tools | None] = None

    def read(self, answer: Message) -> tuple[Any, ...] | None:
        """Return the values of the fields, or None when the answer is not an action."""
        words = answer.text.split(" ")
        if self.verb and words.pop(0) != self.verb:
            return None
        if answer.tool_calls or len(words) != len(self.fields):
            return None
        return _read_fields(
            self.fields,
            [
                int(word) if not field.choices and re.fullmatch(r"[0-9]{1,9}", word) else word
                for word, field in zip(words, self.fields, strict=True)
            ],
        )

    def write(self, action: tuple[Any, ...]) -> Message:
        """Return the answer that chooses the action."""
        words = [self.verb] if self.verb else []
        return assistant(" ".join([*words, *map(str, action)]))

    def reply(self, answer: Message | None, picture: MediaRef, hint: str = "") -> list[Message]:
        """Return the messages to show next; `answer` is None at the start."""
        return [user(hint, picture)]


@dataclass(frozen=True)
class ToolActions:
    """An action is a call of one tool, and the next message is the tool's result."""

    fields: tuple[ActionField, ...]
    name: str
    description: str

    @property
    def tools(self) -> Tools | None:
        properties = {field.name: field.schema for field in self.fields}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return [{"type": "function", "function": function}]

    def read(self, answer: Message) -> tuple[Any, ...] | None:
        if len(answer.tool_calls) != 1 or answer.tool_calls[0].name != self.name:
            return None
        try:
            arguments = json.loads(answer.tool_calls[0].arguments)
        except json.JSONDecodeError:
            return None
        names = [field.name for field in self.fields]
        if not isinstance(arguments, dict) or set(arguments) != set(names):
            return None
        return _read_fields(self.fields, [arguments[name] for name in names])

    def write(self, action: tuple[Any, ...]) -> Message:
        values = {field.name: value for field, value in zip(self.fields, action, strict=True)}
        return Message(role="assistant", tool_calls=(ToolCall(self.name, json.dumps(values)),))

    def reply(self, answer: Message | None, picture: MediaRef, hint: str = "") -> list[Message]:
        calls = answer.tool_calls if answer is not None else ()
        if not calls:
            return [user(hint, picture)]
        results = [
            Message(role="tool", content=text("not done"), tool_call_id=call.id or None)
            for call in calls[:-1]
        ]
        content = (*text(hint), ImagePart(picture))
        return [*results, Message(role="tool", content=content, tool_call_id=calls[-1].id or None)]


ActionFormat = TextActions | ToolActions


def choose_action_format(
    name: str, environment: str, text_format: ActionFormat, tool_format: ActionFormat
) -> ActionFormat:
    """Return the format that `[env.args] actions` names."""
    if name not in ACTION_FORMATS:
        raise ConfigError(
            f"{environment}: unknown [env.args] actions = {name!r}",
            f"use one of {', '.join(map(repr, ACTION_FORMATS))}",
        )
    return text_format if name == "text" else tool_format


def _read_fields(fields: Sequence[ActionField], values: Sequence[Any]) -> tuple[Any, ...] | None:
    action = tuple(field.read(value) for field, value in zip(fields, values, strict=True))
    return None if any(value is None for value in action) else action


class ActionParser(Protocol):
    """Reads an action from an answer."""

    def parse(self, answer: Message) -> Any | None:
        """Return the action, or None when the answer is not an action."""
        ...


@dataclass(frozen=True)
class NamedActions:
    """An action is the whole answer, stripped of surrounding white space."""

    actions: Mapping[str, Any]

    def parse(self, answer: Message) -> Any | None:
        return self.actions.get(answer.text.strip())


def build_parser(
    actions: str | Sequence[str] | Mapping[str, Any] | None, num_actions: int, where: str
) -> ActionParser:
    """Return the parser for the `actions` of a run file.

    A list names the actions 0, 1, 2 and so on. A table maps names to actions. A string is the
    'module:Class' of a parser. By default, each action is called by its number.
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
        raise ConfigError(
            f"{where}: [env.args] actions is empty",
            "name each action once",
        )
    return NamedActions(actions)


def _load_parser(path: str, where: str) -> ActionParser:
    make = load_object(path, f"{where}: [env.args] actions")
    try:
        parser = make()
    except TypeError as error:
        raise ConfigError(
            f"{where}: [env.args] actions = {path!r}: {error}",
            "name a class whose constructor takes no arguments",
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
        ...

    async def step(self, action: Any) -> float:
        """Perform the action and return its reward."""
        ...

    async def draw_action(self, rng: random.Random) -> Any:
        """Return a random valid action."""
        ...


@dataclass(frozen=True)
class EpisodeRules:
    """How answers become actions, and what happens when an answer is not an action."""

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
        """Play until the episode ends or the rollout is truncated, and return what it earned.

        `ending` are further parts of the outcome, read at the end.
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
