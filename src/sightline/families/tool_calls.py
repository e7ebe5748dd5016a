"""Parse tool calls between marks, and arguments whose types the format does not write."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from sightline.errors import MessageError
from sightline.message import ToolCall, check_unicode
from sightline.render import Tokenizer
from sightline.render.protocol import Tools


def parse_calls(
    ids: list[int],
    marks: tuple[int, int],
    tokenizer: Tokenizer,
    parse_call: Callable[[list[int]], ToolCall | None],
) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """Return the calls between the two `marks`, and the raw text of malformed ones.

    `parse_call` gets the ids between the marks of a call, and returns None if it is malformed. Any
    text between calls counts as malformed.
    """
    calls: list[ToolCall] = []
    malformed: list[str] = []
    first, last = marks
    at = ids.index(first) if first in ids else len(ids)
    while at < len(ids):
        end = _find_call_end(ids, at, marks)
        raw = tokenizer.decode(ids[at:end])
        is_closed = ids[at] == first and ids[end - 1] == last
        call = parse_call(ids[at + 1 : end - 1]) if is_closed else None
        if call is not None:
            calls.append(call)
        elif raw.strip():
            malformed.append(raw)
        at = end
    return tuple(calls), tuple(malformed)


def _find_call_end(ids: list[int], at: int, marks: tuple[int, int]) -> int:
    """Return the end of the call, or of the text between two calls, that begins at `at`."""
    for i in range(at + 1, len(ids)):
        if ids[i - 1] == marks[1] or ids[i] == marks[0]:
            return i
    return len(ids)


def check_arguments(call: ToolCall, path: str) -> None:
    """Raise MessageError unless a call's arguments are a JSON object. `path` is the call's."""
    path = f"{path}.function.arguments"
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise MessageError.at(path, "the arguments are not a JSON object", "pass an object")
    check_unicode(json.dumps(arguments, ensure_ascii=False), path)


def get_parameters(tools: Tools, name: str) -> dict[str, Any]:
    """Return the schemas of a function's parameters; empty if they are not declared."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            schemas = parameters.get("properties") if isinstance(parameters, dict) else None
            return schemas if isinstance(schemas, dict) else {}
    return {}


def parse_value(spelled: str, schema: Any, spell: Callable[[Any], str]) -> Any:
    """Return the value that `spell` writes as `spelled`.

    It is a string if the parameter's schema says so, or if no other value is spelled this way.
    """
    kinds = _list_kinds(schema)
    if "string" in kinds and all(kind in ("string", "null") for kind in kinds):
        return None if spelled == spell(None) and "null" in kinds else spelled
    for scalar in (True, False, None):
        if spelled == spell(scalar):
            return scalar
    try:
        value = json.loads(spelled, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return spelled
    if isinstance(value, (dict, list, bool)):
        return value
    # A number that would be spelled differently is a string.
    is_number = isinstance(value, (int, float)) and spell(value) == spelled
    return value if is_number else spelled


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _list_kinds(schema: Any) -> list[Any]:
    """Return the types that a schema allows; ["any"] if it does not say."""
    if not isinstance(schema, dict):
        return ["any"]
    if isinstance(options := schema.get("anyOf"), list):
        return [kind for option in options for kind in _list_kinds(option)]
    if isinstance(values := schema.get("enum"), list):
        return ["string" if isinstance(value, str) else "any" for value in values]
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, list) else [kinds]
