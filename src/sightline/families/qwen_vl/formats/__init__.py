"""Qwen's chat formats.

The model type in config.json says which formats are possible, and the checkpoint's own chat
template decides between them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from sightline.families.checkpoint_files import read_json, read_vocab_size
from sightline.families.protocol import Family
from sightline.families.qwen_vl.formats.calls import JsonCallFormat, TaggedCallFormat
from sightline.families.qwen_vl.formats.reasoning import ReasoningFormat
from sightline.families.qwen_vl.render import QwenRenderer
from sightline.families.renderer import ParsedCompletion, RenderContext
from sightline.families.template_check import choose_format
from sightline.message import ImageResolver, Message, Part, TextPart, join_texts
from sightline.render import Tokenizer
from sightline.render.protocol import Tools


class Qwen25VL(QwenRenderer):
    format_name = "Qwen2.5-VL"
    default_system = "You are a helpful assistant."
    takes_tools = False
    image_roles = ("system", "user")


class Qwen3VL(JsonCallFormat):
    format_name = "Qwen3-VL"

    def drop_unwritten(self, message: Message) -> Message:
        """Keep an empty content: with it, the template writes a newline before a call."""
        less = super().drop_unwritten(message)
        has_calls = message.role == "assistant" and message.tool_calls
        content = less.content or message.content[:1]
        return msgspec.structs.replace(less, content=content) if has_calls else less


class Qwen3(ReasoningFormat, JsonCallFormat):
    """The model itself opens a block of reasoning, not the header."""

    format_name = "Qwen3"


class Qwen3VLThinking(Qwen3):
    format_name = "Qwen3-VL thinking"
    opens_reasoning = True


class Qwen35(ReasoningFormat, TaggedCallFormat):
    """Contents are stripped, and every turn since the last question shows its reasoning."""

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
        # Its template opens no turn for a tool message at the start of a conversation.
        return (i > 0 or context.is_new) and super().opens_tool_turn(context, i)


class Qwen35NonThinking(Qwen35):
    """The smallest models: a turn's header contains an empty block of reasoning."""

    format_name = "Qwen3.5 non-thinking"
    opens_reasoning = False
    closes_reasoning = True

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
"""By model type. A folder without a template speaks the first."""


def load_renderer(
    path: Path, family: Family, resolver: ImageResolver, number_images: bool = False
) -> QwenRenderer:
    """Return the renderer of a checkpoint folder; FamilyError if its chat template is unknown."""
    tokenizer = Tokenizer(path)
    vocab_size = read_vocab_size(path, tokenizer)
    formats = FORMATS[read_json(path / "config.json")["model_type"]]
    renderer = choose_format(
        path, formats, lambda kind: kind(tokenizer, family, resolver, vocab_size)
    )
    # Templates are compared without image numbers, which the caller asks for.
    renderer.numbers_images = number_images
    if number_images and not renderer.video_refusal:
        renderer.video_refusal = "images are numbered ([model] number_images)"
    return renderer
