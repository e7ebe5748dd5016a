"""How formats write the tools on offer and the calls of them: as JSON, or as tags."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from sightline.errors import MessageError
from sightline.families.message_fields import encode_tool
from sightline.families.qwen_vl.render import QwenRenderer
from sightline.message import Message, ToolCall, check_unicode, is_whole_text
from sightline.render import Emitter
from sightline.render.protocol import Tools

_JSON_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_JSON_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_TAGS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_TAGS_TAIL = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO "
    "suffix:\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n"
    "value_1\n</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second "
    "parameter\nthat can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n"
    "<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner "
    "<function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n- You may provide optional reasoning for your "
    "function call in natural language BEFORE the function call, but NOT after\n- If there is no "
    "function call available, answer the question like normal with your current knowledge and do "
    "not tell the user about function calls\n</IMPORTANT>"
)

_FUNCTION = re.compile(r"\n<function=([^\n>]+)>\n(.*)</function>\n", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^\n>]+)>\n(.*?)\n</parameter>\n", re.DOTALL)
_SCALARS = {"True": True, "False": False, "None": None}


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class JsonCallFormat(QwenRenderer):
    """A call is a JSON object with name and arguments."""

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        self.open_turn(emitter, "system")
        if first.role == "system":
            emitter.text(first.text + "\n\n")
        emitter.text(_JSON_HEAD + _list_tools(tools))
        self.emit_marked(emitter, _JSON_TAIL)
        self.close_turn(emitter)

    def emit_call(self, emitter: Emitter, call: ToolCall) -> None:
        emitter.text(f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n')

    def parse_call(self, inner: str, tools: Tools) -> ToolCall | None:
        try:
            call = msgspec.json.decode(inner, type=_Call)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return ToolCall(name=call.name, arguments=bytes(call.arguments).decode())


class TaggedCallFormat(QwenRenderer):
    """A call is a function tag around one parameter tag for each argument."""

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        self.open_turn(emitter, "system")
        emitter.text(_TAGS_HEAD + _list_tools(tools))
        self.emit_marked(emitter, _TAGS_TAIL)
        content = first.text.strip() if first.role == "system" else ""
        emitter.text("\n\n" + content if content else "")
        self.close_turn(emitter)

    def check_call(self, call: ToolCall, path: str) -> None:
        path = f"{path}.function.arguments"
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise MessageError.at(path, "not a JSON object", "pass an object of arguments")
        check_unicode(json.dumps(arguments, ensure_ascii=False), path)

    def emit_call(self, emitter: Emitter, call: ToolCall) -> None:
        emitter.text(f"\n<function={call.name}>\n")
        for name, value in json.loads(call.arguments).items():
            emitter.text(f"<parameter={name}>\n{_spell_value(value)}\n</parameter>\n")
        emitter.text("</function>\n")

    def parse_call(self, inner: str, tools: Tools) -> ToolCall | None:
        function = _FUNCTION.fullmatch(inner)
        if function is None:
            return None
        arguments: dict[str, Any] = {}
        name, body = function.groups()
        declared = _get_parameters(tools, name)
        at = 0
        while at < len(body):
            parameter = _PARAMETER.match(body, at)
            if parameter is None or parameter[1] in arguments:
                return None
            arguments[parameter[1]] = _parse_value(parameter[2], declared.get(parameter[1]))
            at = parameter.end()
        encoded = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name=name, arguments=encoded) if is_whole_text(encoded) else None


def _list_tools(tools: Tools) -> str:
    return "".join("\n" + encode_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _spell_value(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _get_parameters(tools: Tools, name: str) -> dict[str, Any]:
    """The schemas of a function's parameters; none where its declaration is of another shape."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, dict) else None
            return found if isinstance(found, dict) else {}
    return {}


def _list_kinds(schema: Any) -> list[Any]:
    """The types that a schema lets a value have; `any` where it does not say."""
    if not isinstance(schema, dict):
        return ["any"]
    if isinstance(options := schema.get("anyOf"), list):
        return [kind for option in options for kind in _list_kinds(option)]
    if isinstance(values := schema.get("enum"), list):
        return ["string" if isinstance(value, str) else "any" for value in values]
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, list) else [kinds]


def _parse_value(spelled: str, schema: Any) -> Any:
    """The value that the template spells this way: a string where the schema of the parameter
    says so, or where nothing else is spelled so."""
    kinds = _list_kinds(schema)
    if "string" in kinds and all(kind in ("string", "null") for kind in kinds):
        return None if spelled == "None" and "null" in kinds else spelled
    if spelled in _SCALARS:
        return _SCALARS[spelled]
    try:
        value = json.loads(spelled)
    except (ValueError, RecursionError):
        return spelled
    # A number that Python would spell in another way was no number.
    if isinstance(value, (dict, list)) or str(value) == spelled or isinstance(value, bool):
        return value
    return spelled
