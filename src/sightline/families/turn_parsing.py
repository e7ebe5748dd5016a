"""Parse reasoning in `<think>` tags and tool calls between marks, and check tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from sightline.errors import MessageError
from sightline.message import Message, ToolCall, check_unicode
from sightline.render import Tokenizer
from sightline.render.protocol import Tools

THINK, END_THINK = "<think>", "</think>"
MAX_TOOL_DEPTH = 64
"""The maximum nesting depth of a tool's JSON."""


def keep_told_reasoning(less: Message, message: Message) -> Message:
    """Return the reduced message `less`, with explicitly empty reasoning if `message` has it.

    Empty reasoning keeps a template from searching the content for reasoning.
    """
    is_told = message.reasoning == "" and END_THINK in message.text
    return msgspec.structs.replace(less, reasoning="") if is_told else less


def split_told_reasoning(reasoning: str | None, content: str) -> tuple[str, str]:
    """Return reasoning and content. Without explicit reasoning, search the content for it."""
    if reasoning is not None or END_THINK not in content:
        return reasoning or "", content
    reasoning = content.split(END_THINK)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
    return reasoning, content.split(END_THINK)[-1].lstrip("\n")


def split_sampled_reasoning(
    ids: list[int], tokenizer: Tokenizer, marks: tuple[int, int, int], is_open: bool = False
) -> tuple[str | None, list[int]]:
    """Return the reasoning of a completion, or None, and the ids after it.

    `marks` open reasoning, close it, and open a call. With `is_open`, the prompt opens reasoning.
    """
    think, end_think, call = marks
    start = 0
    if not is_open or ids[:1] == [think]:
        if think not in ids:
            return None, ids
        start = ids.index(think) + 1
        if tokenizer.decode(ids[: start - 1]).strip():
            return None, ids
    # A call ends unclosed reasoning. A call inside closed reasoning is part of it.
    ends = [mark for mark in (end_think, call) if mark in ids[start:]]
    end = ids.index(ends[0], start) if ends else len(ids)
    return tokenizer.decode(ids[start:end]), ids[end + (ends[:1] == [end_think]) :]


def parse_calls(
    ids: list[int],
    marks: tuple[int, int],
    tokenizer: Tokenizer,
    parse_call: Callable[[list[int]], ToolCall | None],
) -> tuple[str, tuple[ToolCall, ...], tuple[str, ...]]:
    """Return the content before the calls, the calls, and the raw text of malformed ones.

    A call is enclosed by the two `marks`. `parse_call` gets the ids between them, and returns None
    for a malformed call. Text between calls counts as malformed. If anything is malformed, no calls
    are returned, and the content is the whole text.
    """
    calls: list[ToolCall] = []
    malformed: list[str] = []
    first, last = marks
    begin = at = ids.index(first) if first in ids else len(ids)
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
    if malformed:
        return tokenizer.decode(ids), (), tuple(malformed)
    return tokenizer.decode(ids[:begin] if calls else ids), tuple(calls), ()


def _find_call_end(ids: list[int], at: int, marks: tuple[int, int]) -> int:
    """Return the end of the call, or of the text between calls, that begins at `at`."""
    for i in range(at + 1, len(ids)):
        if ids[i - 1] == marks[1] or ids[i] == marks[0]:
            return i
    return len(ids)


def check_arguments(call: ToolCall, path: str) -> None:
    """Raise MessageError unless a call's arguments are a JSON object. `path` names the call."""
    path = f"{path}.function.arguments"
    try:
        arguments = json.loads(call.arguments, parse_constant=_refuse_constant)  # such as NaN
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise MessageError.at(path, "the arguments are not a JSON object", "pass an object")
    check_unicode(json.dumps(arguments, ensure_ascii=False), path)


def get_parameters(tools: Tools, name: str) -> dict[str, Any]:
    """Return the schemas of a function's parameters, or {} if they are not declared."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            schemas = parameters.get("properties") if isinstance(parameters, dict) else None
            return schemas if isinstance(schemas, dict) else {}
    return {}


def parse_value(spelled: str, schema: Any, spell: Callable[[Any], str]) -> Any:
    """Return the value that `spell` writes as `spelled`.

    It is a string if the parameter's schema says so, or if no other value is written this way.
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
    # A number that `spell` would write differently is a string.
    is_number = isinstance(value, (int, float)) and spell(value) == spelled
    return value if is_number else spelled


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _list_kinds(schema: Any) -> list[Any]:
    """Return the types that a schema allows, or ["any"] if it does not specify any."""
    if not isinstance(schema, dict):
        return ["any"]
    if isinstance(options := schema.get("anyOf"), list):
        return [kind for option in options for kind in _list_kinds(option)]
    if isinstance(values := schema.get("enum"), list):
        return ["string" if isinstance(value, str) else "any" for value in values]
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, list) else [kinds]


def encode_tool(tool: Any, path: str) -> str:
    """Return a tool as JSON. `path` is used in errors."""
    check_depth([tool], path)
    try:
        encoded = json.dumps(tool, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise MessageError.at(path, f"this is not JSON: {error}", "pass plain dicts") from None
    check_unicode(encoded, path)
    return encoded


def check_depth(value: Any, path: str, most: int = MAX_TOOL_DEPTH) -> None:
    """Raise MessageError for JSON with more than `most` nesting levels."""
    level = [value]
    for _ in range(most + 1):
        values = (v.values() if isinstance(v, dict) else v for v in level)
        nested = (v for part in values for v in part if isinstance(v, dict | list | tuple))
        level = list({id(v): v for v in nested}.values())  # each once, even in a cycle
        if not level:
            return
    raise MessageError.at(path, f"it is nested deeper than {most} levels", "flatten the schema")
