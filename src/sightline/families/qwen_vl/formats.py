"""Qwen's chat formats, which write tool calls as JSON or as tags.

The model type in config.json determines the possible formats. The checkpoint's own chat template
decides between them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import Family
from sightline.families.qwen_vl.render import QwenRenderer, ReasoningFormat
from sightline.families.renderer import ParsedCompletion, RenderContext
from sightline.families.template_check import choose_format
from sightline.families.turn_parsing import (
    check_arguments,
    encode_tool,
    get_parameters,
    parse_value,
)
from sightline.message import (
    ImageResolver,
    Message,
    Part,
    TextPart,
    ToolCall,
    is_whole_text,
    join_texts,
)
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
    """A format in which a call is a JSON object with name and arguments."""

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        self.open_turn(emitter, "system")
        if first.role == "system":
            emitter.text(first.text + "\n\n")
        emitter.text(_JSON_HEAD + _list_tools(tools))
        emitter.marked(_JSON_TAIL)
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
    """A format in which a call is a function tag with one parameter tag per argument."""

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        self.open_turn(emitter, "system")
        emitter.text(_TAGS_HEAD + _list_tools(tools))
        emitter.marked(_TAGS_TAIL)
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
            schema = declared.get(parameter[1])
            arguments[parameter[1]] = parse_value(parameter[2], schema, _spell_value)
            at = parameter.end()
        encoded = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name=name, arguments=encoded) if is_whole_text(encoded) else None


def _list_tools(tools: Tools) -> str:
    return "".join("\n" + encode_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _spell_value(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


class Qwen25VL(QwenRenderer):
    format_name = "Qwen2.5-VL"
    default_system = "You are a helpful assistant."
    takes_tools = False
    image_roles = ("system", "user")


class Qwen3VL(JsonCallFormat):
    format_name = "Qwen3-VL"

    def drop_unwritten(self, message: Message) -> Message:
        """Keep empty content, because the template then writes a newline before a call."""
        less = super().drop_unwritten(message)
        has_calls = message.role == "assistant" and message.tool_calls
        content = less.content or message.content[:1]
        return msgspec.structs.replace(less, content=content) if has_calls else less


class Qwen3(ReasoningFormat, JsonCallFormat):
    """The format of Qwen3. The model opens the reasoning block, not the header."""

    format_name = "Qwen3"


class Qwen3VLThinking(Qwen3):
    format_name = "Qwen3-VL thinking"
    opens_reasoning = True
    header_text = QwenRenderer.header_text + "<think>\n"


class Qwen35(ReasoningFormat, TaggedCallFormat):
    """The format of Qwen3.5. Content is stripped. Turns since the last question show reasoning."""

    format_name = "Qwen3.5"
    requires_question = True
    opens_reasoning = True
    header_text = QwenRenderer.header_text + "<think>\n"
    keeps_empty_reasoning = True
    stripped = None
    call_separator = "\n\n"

    def strip_content(self, content: str) -> str:
        return content.strip()

    def get_parts(self, message: Message) -> tuple[Part, ...]:
        parts = list(message.content)
        if parts and isinstance(parts[0], TextPart):
            parts[0] = TextPart(parts[0].text.lstrip())
        if parts and isinstance(parts[-1], TextPart):
            parts[-1] = TextPart(parts[-1].text.rstrip())
        return join_texts(parts)

    def opens_tool_turn(self, context: RenderContext, i: int) -> bool:
        # The template does not open a turn for a tool message at the start of a conversation.
        return (i > 0 or context.is_new) and super().opens_tool_turn(context, i)


class Qwen35NonThinking(Qwen35):
    """The format of the smallest models. A turn's header contains an empty reasoning block."""

    format_name = "Qwen3.5 non-thinking"
    opens_reasoning = False
    closes_reasoning = True
    header_text = QwenRenderer.header_text + "<think>\n\n</think>\n\n"

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        parsed = super().parse_turn(ids, tools)
        return replace(parsed, content=self.strip_content(parsed.content))


FORMATS: dict[str, tuple[type[QwenRenderer], ...]] = {
    "qwen2_5_vl": (Qwen25VL,),
    "qwen3_vl": (Qwen3VL, Qwen3VLThinking),
    "qwen3_vl_moe": (Qwen3VL, Qwen3VLThinking),
    "qwen3_5": (Qwen35, Qwen35NonThinking),
    "qwen3_5_moe": (Qwen35,),
    "qwen3": (Qwen3,),
    "qwen3_moe": (Qwen3,),
}
"""The formats by model type. A folder without a template uses the first."""


def load_renderer(path: Path, family: Family, resolver: ImageResolver) -> QwenRenderer:
    formats = FORMATS[read_json(path / "config.json")["model_type"]]
    return choose_format(path, formats, family, resolver)
