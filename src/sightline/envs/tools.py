"""Python functions as tools: schemas for the prompt, and results as messages."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from sightline.errors import ConfigError, EnvironmentFailed, mask
from sightline.media import MediaRef
from sightline.message import (
    AssistantMessage,
    Message,
    Part,
    TextPart,
    ToolCall,
    VideoPart,
    join_texts,
    user,
)
from sightline.message.parts import build_part

Put = Callable[[Any], MediaRef]


class ToolError(Exception):
    """Raised by a tool if the model made a mistake. The model gets the message."""


@dataclass(frozen=True)
class Tool:
    function: Callable[..., Any]
    schema: dict[str, Any]
    hints: dict[str, Any]
    """Type of each parameter."""
    required: frozenset[str]


class Toolbox:
    """Tools from functions: `Toolbox(click, scroll)`.

    A function's name, the first paragraph of its docstring and its annotated parameters become the
    schema; `Annotated[int, "pixels from the left"]` describes a parameter. A result is text, an
    image, anything that JSON can encode, or a tuple of those.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._tools = {function.__name__: _build_tool(function) for function in functions}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas for `chat.send(..., tools=...)`."""
        return [tool.schema for tool in self._tools.values()]

    async def run(self, answer: AssistantMessage, put: Put) -> list[Message]:
        """Run an answer's tool calls in order and return a message for each.

        Sync functions run in a thread. In a plain `def rollout`, use
        `chat.wait(toolbox.run(answer, chat.put))`.
        """
        results = []
        for call in answer.tool_calls:
            try:
                function, values = self._bind_call(call)
                if inspect.iscoroutinefunction(function):
                    result = await function(**values)
                else:
                    result = await asyncio.to_thread(function, **values)
            except ToolError as error:
                result = f"error: {mask(str(error))}"
            outputs = result if isinstance(result, tuple) else (result,)
            parts = join_texts([_result_part(part, put) for part in outputs if part is not None])
            results.append(Message("tool", parts, tool_call_id=call.id or None))
        return results

    def read(self, answer: AssistantMessage) -> dict[str, Any] | None:
        """Return the arguments of the answer's only call; None if it is not a valid call."""
        if len(answer.tool_calls) != 1:
            return None
        try:
            return self._bind_call(answer.tool_calls[0])[1]
        except ToolError:
            return None

    def _bind_call(self, call: ToolCall) -> tuple[Callable[..., Any], dict[str, Any]]:
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"no tool {call.name!r}. There are {', '.join(self._tools)}")
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            raise ToolError(f"the arguments are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ToolError("the arguments are not an object")
        if unknown := arguments.keys() - tool.hints.keys():
            raise ToolError(f"unknown arguments: {', '.join(sorted(unknown))}")
        if missing := tool.required - arguments.keys():
            raise ToolError(f"missing arguments: {', '.join(sorted(missing))}")
        values = {}
        for name, value in arguments.items():
            try:
                values[name] = msgspec.convert(value, tool.hints[name])
            except msgspec.ValidationError as error:
                raise ToolError(f"{name}: {error}") from error
        return tool.function, values


def reply_to_calls(answer: Message | None, *parts: Any) -> list[Message]:
    """Return a message for each call, the last with `parts`, or a user message if none."""
    calls = answer.tool_calls if answer is not None else ()
    if not calls:
        return [user(*parts)]
    return [
        Message("tool", user(*content).content, tool_call_id=call.id or None)
        for call, content in zip(calls, [*[["not done"]] * (len(calls) - 1), parts], strict=True)
    ]


def _build_tool(function: Callable[..., Any]) -> Tool:
    hints = typing.get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    properties, required, types = {}, [], {}
    where = f"tool {function.__name__}"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{where} takes *{name}", "declare each parameter by name")
        if name not in hints:
            raise ConfigError(f"{where}: parameter {name} has no type", "annotate it")
        types[name], note = _split_annotation(hints[name])
        properties[name] = _type_schema(types[name], f"{where}: parameter {name}")
        if note:
            properties[name]["description"] = note
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            properties[name]["default"] = parameter.default
    schema = {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }
    return Tool(function, schema, types, frozenset(required))


def _split_annotation(hint: Any) -> tuple[Any, str]:
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, ""
    kind, *notes = typing.get_args(hint)
    return kind, next((note for note in notes if isinstance(note, str)), "")


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    if typing.get_origin(hint) is Literal:  # msgspec would sort its values
        return {"enum": list(typing.get_args(hint))}
    try:
        (schema,), classes = msgspec.json.schema_components((hint,))
    except TypeError:
        schema, classes = {}, {}
    if classes or not schema:
        raise ConfigError(
            f"{where}: {hint} has no JSON type",
            "use str, int, float, bool, Literal, list, dict, or a union of those",
        )
    return schema


def _result_part(result: Any, put: Put) -> Part:
    if isinstance(result, str | MediaRef | VideoPart):
        return build_part(result)
    if isinstance(result, bytes | Path) or hasattr(result, "getbands"):  # a PIL image
        return build_part(put(result))
    try:
        return TextPart(msgspec.json.encode(result).decode())
    except TypeError as error:
        raise EnvironmentFailed(
            f"a tool returned a {type(result).__name__}",
            "return text, an image, a video, a JSON value, or a tuple of those",
        ) from error
