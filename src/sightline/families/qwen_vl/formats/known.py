"""The formats that are known, each as its template writes it."""

from __future__ import annotations

from sightline.families.qwen_vl.formats.calls import JsonCallFormat, TaggedCallFormat
from sightline.families.qwen_vl.formats.reasoning import ReasoningFormat
from sightline.families.qwen_vl.render import QwenRenderer
from sightline.families.renderer import RenderContext
from sightline.message import Message, Part, TextPart, join_texts


class Qwen25VL(QwenRenderer):
    format_name = "Qwen2.5-VL"
    default_system = "You are a helpful assistant."
    takes_tools = False


class Qwen3VL(JsonCallFormat):
    format_name = "Qwen3-VL"


class Qwen3(ReasoningFormat, JsonCallFormat):
    """The model itself opens a block of reasoning: the header does not."""

    format_name = "Qwen3"


class Qwen3VLThinking(Qwen3):
    format_name = "Qwen3-VL thinking"
    opens_reasoning = True


class Qwen35(ReasoningFormat, TaggedCallFormat):
    """Every content is stripped, and every turn since the last question shows its block."""

    format_name = "Qwen3.5"
    requires_question = True
    opens_reasoning = True
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
        # Its template opens none for a tool message that comes first of all.
        return (i > 0 or context.is_new) and super().opens_tool_turn(context, i)
