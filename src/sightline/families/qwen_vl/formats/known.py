"""The formats that are known, each as its template writes it."""

from __future__ import annotations

from sightline.families.qwen_vl.formats.base import ChatFormat, RenderContext
from sightline.families.qwen_vl.formats.calls import JsonCallFormat, TaggedCallFormat
from sightline.families.qwen_vl.formats.reasoning import ReasoningFormat
from sightline.message import Message, Part, TextPart, join_texts


class Qwen25VL(ChatFormat):
    name = "Qwen2.5-VL"
    default_system = "You are a helpful assistant."
    takes_tools = False
    not_carried = ("text of None and empty text",)


class Qwen3VL(JsonCallFormat):
    name = "Qwen3-VL"


class Qwen3(ReasoningFormat, JsonCallFormat):
    """Its header leaves it to the model to open a block."""

    name = "Qwen3"
    not_carried = tuple(dict.fromkeys((*ReasoningFormat.not_carried, *JsonCallFormat.not_carried)))


class Qwen3VLThinking(Qwen3):
    name = "Qwen3-VL thinking"
    opens_reasoning = True


class Qwen35(ReasoningFormat, TaggedCallFormat):
    """Every content is stripped, and every turn since the last question shows its block."""

    name = "Qwen3.5"
    requires_question = True
    opens_reasoning = True
    keeps_empty_reasoning = True
    not_carried = tuple(
        dict.fromkeys(
            (
                *ReasoningFormat.not_carried,
                *TaggedCallFormat.not_carried,
                "white space around a message, and around reasoning",
            )
        )
    )

    def trim(self, reasoning: str) -> str:
        return reasoning.strip()

    def lead(self, content: str) -> str:
        return content

    def strip(self, content: str) -> str:
        return content.strip()

    def before_call(self, content: str) -> str:
        return "\n\n" if content else ""

    def parts(self, message: Message) -> tuple[Part, ...]:
        parts = list(message.content)
        if parts and isinstance(parts[0], TextPart):
            parts[0] = TextPart(parts[0].text.lstrip())
        if parts and isinstance(parts[-1], TextPart):
            parts[-1] = TextPart(parts[-1].text.rstrip())
        return join_texts(parts)

    def opens_tool_turn(self, context: RenderContext, i: int) -> bool:
        # Its template opens none for a tool message that comes first of all.
        return (i > 0 or context.is_new) and super().opens_tool_turn(context, i)
