"""The chat formats of Llama 3, with exactly the tokens of their templates.

A turn is `<|start_header_id|>role<|end_header_id|>`, two newlines, the stripped content and
`<|eot_id|>`. Since Llama 3.1, a system turn with two dates always comes first.

Tools are refused, because a call is plain JSON and looks like an answer in JSON.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from sightline.errors import FamilyError
from sightline.families.protocol import Family
from sightline.families.renderer import BaseRenderer, ParsedCompletion, RenderContext
from sightline.families.template_check import choose_format
from sightline.message import ImageResolver, Message, Part, TextPart
from sightline.render import Emitter
from sightline.render.protocol import Tools

DATE = "26 Jul 2024"
"""The date in every prompt: the templates' default. With the current date, prompts would change at
midnight during a run."""
_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class Llama3(BaseRenderer):
    format_name = "Llama 3"
    template_settings = MappingProxyType({"bos_token": _MARKS[0], "date_string": DATE})
    takes_tools = False
    takes_reasoning = False
    tools_refusal = "a tool call of Llama 3 has no mark to distinguish it from an answer"
    pad_token_ids = ()

    def find_tokens(self) -> None:
        tokenizer = self._tokenizer
        if missing := [mark for mark in _MARKS if tokenizer.find_token_id(mark) is None]:
            raise FamilyError(
                "a 'llama' checkpoint without Llama 3's chat format: its tokenizer has no token "
                f"{missing[0]!r}",
                "use a Llama 3 checkpoint, or add a family (docs/internals/adding_a_family.md)",
            )
        self.end_id = tokenizer.token_id("<|eot_id|>")
        others = self.find_token_ids(("<|end_of_text|>", "<|eom_id|>"))
        self.stop_token_ids = (self.end_id, *others)
        self.header = tokenizer.encode_marked(_open_turn("assistant"))

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        emitter.marked("<|begin_of_text|>")
        return 0

    def get_parts(self, message: Message) -> tuple[Part, ...]:
        return (TextPart(message.text.strip()),)

    def emit_message(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        role = context.messages[i].role
        emitter.marked(_open_turn(role))
        if role == "assistant":
            emitter.begin_trained()
        self.emit_content(emitter, context, i)
        emitter.special(self.end_id)
        if role == "assistant":
            emitter.end_trained()

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        return ParsedCompletion(self._tokenizer.decode(ids))


class Llama31(Llama3):
    """The format of Llama 3.1 to 3.3. The system turn states dates, even if it has no content."""

    format_name = "Llama 3.1"

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        super().emit_head(emitter, context, tools)
        emitter.marked(_open_turn("system"))
        emitter.text(f"Cutting Knowledge Date: December 2023\nToday Date: {DATE}\n\n")
        first = context.messages[0]
        is_system = first.role == "system"
        emitter.text(first.text.strip() if is_system else "")
        emitter.special(self.end_id)
        return int(is_system)


def _open_turn(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def load_renderer(path: Path, family: Family, resolver: ImageResolver) -> Llama3:
    formats: tuple[type[Llama3], ...] = (Llama31, Llama3)
    return choose_format(path, formats, family, resolver)
