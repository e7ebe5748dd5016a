"""How formats write tools and calls: as JSON, or as tags."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from sightline.families.message_fields import encode_tool
from sightline.families.qwen_vl.render import QwenRenderer
from sightline.families.tool_calls import check_arguments, get_parameters, parse_value
from sightline.message import Message, ToolCall, is_whole_text
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
    """A call is a function tag around one parameter tag per argument."""

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        self.open_turn(emitter, "system")
        emitter.text(_TAGS_HEAD + _list_tools(tools))
        self.emit_marked(emitter, _TAGS_TAIL)
        content = first.text.strip() if first.role == "system" else ""
        emitter.text("\n\n" + content if content else "")
        self.close_turn(emitter)

    def check_call(self, call: ToolCall, path: str) -> None:
        check_arguments(call, path)

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
        declared = get_parameters(tools, name)
        at = 0
        while at < len(body):
            parameter = _PARAMETER.match(body, at)
            if parameter is None or parameter[1] in arguments:
                return None
            arguments[parameter[1]] = parse_value(
                parameter[2], declared.get(parameter[1]), _spell_value
            )
            at = parameter.end()
        encoded = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name=name, arguments=encoded) if is_whole_text(encoded) else None


def _list_tools(tools: Tools) -> str:
    return "".join("\n" + encode_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _spell_value(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
