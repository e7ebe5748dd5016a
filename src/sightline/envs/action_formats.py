"""How a model says what to do: as plain text, or by calling a tool.

An action format offers its tools, reads an answer, and writes what the model would have had to say
or hear. Environments that act keep to one format in a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sightline.envs.protocol import Tools
from sightline.errors import ConfigError
from sightline.media import MediaRef
from sightline.message import ImagePart, Message, ToolCall, assistant, text, user

ACTION_FORMATS = ("text", "tool")


class ActionFormat(Protocol):
    """Reads and writes actions. An action is a tuple of the values of its fields."""

    @property
    def tools(self) -> Tools | None: ...

    def read(self, answer: Message) -> tuple[Any, ...] | None:
        """The action that the model chose; None when the answer is none."""
        ...

    def write(self, action: tuple[Any, ...]) -> Message:
        """The answer that chooses the action."""
        ...

    def reply(self, answer: Message | None, picture: MediaRef, hint: str = "") -> list[Message]:
        """What the model is shown next; `answer` is None at the start."""
        ...


@dataclass(frozen=True)
class ActionField:
    """A value of an action: one of a few words, or a whole number from 0 on."""

    name: str
    choices: tuple[str, ...] = ()
    num_values: int = 0

    @property
    def schema(self) -> dict[str, Any]:
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "integer", "minimum": 0, "maximum": self.num_values - 1}

    def read(self, value: Any) -> Any:
        """The value, or None when it is out of bounds or of another type."""
        if self.choices:
            return value if value in self.choices else None
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return value if is_number and 0 <= value < self.num_values else None


@dataclass(frozen=True)
class TextActions:
    """The whole answer is the action: `U`, or `click 40 12`."""

    fields: tuple[ActionField, ...]
    verb: str = ""
    """The first word, where the action has one."""

    @property
    def tools(self) -> Tools | None:
        return None

    def read(self, answer: Message) -> tuple[Any, ...] | None:
        words = answer.text.split(" ")
        if self.verb:
            if words[0] != self.verb:
                return None
            words = words[1:]
        if answer.tool_calls or len(words) != len(self.fields):
            return None
        return _read_fields(
            self.fields, [_read_word(w, f) for w, f in zip(words, self.fields, strict=True)]
        )

    def write(self, action: tuple[Any, ...]) -> Message:
        words = [self.verb] if self.verb else []
        return assistant(" ".join([*words, *map(str, action)]))

    def reply(self, answer: Message | None, picture: MediaRef, hint: str = "") -> list[Message]:
        return [user(hint, picture)]


@dataclass(frozen=True)
class ToolActions:
    """The answer calls one tool, and what follows is the tool's result."""

    fields: tuple[ActionField, ...]
    name: str
    description: str

    @property
    def tools(self) -> Tools | None:
        properties = {field.name: field.schema for field in self.fields}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
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
        shown = (*text(hint), ImagePart(picture))
        return [*results, Message(role="tool", content=shown, tool_call_id=calls[-1].id or None)]


def choose_action_format(
    name: str, environment: str, text_format: ActionFormat, tool_format: ActionFormat
) -> ActionFormat:
    """The format that `[env.args] actions` names."""
    if name not in ACTION_FORMATS:
        raise ConfigError(
            f"{environment}: actions = {name!r}",
            f"use one of {', '.join(map(repr, ACTION_FORMATS))}",
        )
    return text_format if name == "text" else tool_format


def _read_word(word: str, field: ActionField) -> Any:
    if field.choices:
        return word
    return int(word) if re.fullmatch(r"[0-9]{1,9}", word) else None


def _read_fields(fields: Sequence[ActionField], values: Sequence[Any]) -> tuple[Any, ...] | None:
    read = tuple(field.read(value) for field, value in zip(fields, values, strict=True))
    return None if any(value is None for value in read) else read
