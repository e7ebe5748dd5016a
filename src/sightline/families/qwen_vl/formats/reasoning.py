"""Formats with reasoning between `<think>` and `</think>`.

A template shows the reasoning of turns since the last question and drops older reasoning. A new
question therefore rewrites history, and the bridge refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sightline.families.protocol import Family
from sightline.families.qwen_vl.render import QwenRenderer
from sightline.families.reasoning import (
    END_THINK,
    THINK,
    keep_told_reasoning,
    split_sampled_reasoning,
    split_told_reasoning,
)
from sightline.families.renderer import RenderContext
from sightline.message import ImageResolver, Message
from sightline.render import Emitter, Tokenizer


class ReasoningFormat(QwenRenderer):
    """Qwen3's rule: a turn that is not the last shows its reasoning only if it is not empty."""

    takes_reasoning = True
    opens_reasoning: ClassVar[bool] = False
    """Whether a turn's header opens the reasoning."""
    closes_reasoning: ClassVar[bool] = False
    """Whether a turn's header contains empty reasoning."""
    keeps_empty_reasoning: ClassVar[bool] = False
    """Whether turns since the last question show even empty reasoning."""
    stripped: ClassVar[str | None] = "\n"
    """The characters that are stripped from reasoning. None is all whitespace."""
    call_separator: ClassVar[str] = "\n"
    """The text between the content and the first call."""

    def __init__(
        self, tokenizer: Tokenizer, family: Family, resolver: ImageResolver, vocab_size: int
    ) -> None:
        self._think = tokenizer.token_id(THINK)
        self._think_end = tokenizer.token_id(END_THINK)
        super().__init__(tokenizer, family, resolver, vocab_size)

    def make_header(self) -> list[int]:
        header = super().make_header()
        if self.opens_reasoning:
            header += [self._think, *self._tokenizer.encode("\n")]
        elif self.closes_reasoning:
            blank = self._tokenizer.encode("\n\n")
            header += [self._think, *blank, self._think_end, *blank]
        return header

    def drop_unwritten(self, message: Message) -> Message:
        return keep_told_reasoning(super().drop_unwritten(message), message)

    def split_message(self, message: Message) -> tuple[str, str]:
        content = "".join(getattr(part, "text", "") for part in self.get_parts(message))
        return split_told_reasoning(message.reasoning, content)

    def emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        reasoning, content = self.split_message(message)
        is_shown = i > context.history_end and (
            self.keeps_empty_reasoning or bool(reasoning) or i + 1 == len(context.messages)
        )
        self.open_turn(emitter, message.role)
        if is_shown:
            if not self.opens_reasoning:
                emitter.begin_trained()
            emitter.special(self._think)
            emitter.text("\n")
            if self.opens_reasoning:
                emitter.begin_trained()
            thought = reasoning.strip(self.stripped)
            emitter.text(thought + "\n")
            emitter.special(self._think_end)
            emitter.text("\n\n")
            if self.closes_reasoning and not thought:
                emitter.begin_trained()
            emitter.text(content.lstrip("\n"))
        else:
            emitter.begin_trained()
            emitter.text(content)
        self.emit_calls(emitter, message.tool_calls, self.call_separator if content else "")

    # -- bridging

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        has_block = self.opens_reasoning or self._think in ids or self._think_end in ids
        if any(map(self.is_question, new)):
            # Reasoning in the prompt belongs to turns since the last question.
            return has_block or self._think in prompt_ids
        if self.closes_reasoning:  # the template would replace the empty block
            return has_block
        return has_block and not self.keeps_empty_reasoning and not self.split_reasoning(ids)[0]

    def describe_turns(self) -> str:
        return (
            "appended to the existing tokens, or rendered again if a new question drops reasoning"
        )

    def is_reasoning_open(self, ids: list[int]) -> bool:
        opened = self.opens_reasoning or self._think in ids
        return opened and self._think_end not in ids and self._call_start not in ids

    def close_reasoning(self, emitter: Emitter, ids: list[int]) -> None:
        if not self._tokenizer.decode(ids[-1:]).endswith("\n"):
            emitter.text("\n")
        emitter.special(self._think_end)
        emitter.text("\n\n")

    # -- parsing

    def split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int]]:
        marks = (self._think, self._think_end, self._call_start)
        reasoning, rest = split_sampled_reasoning(
            ids, self._tokenizer, marks, is_open=self.opens_reasoning
        )
        return (reasoning or "").strip(self.stripped) or None, rest

    def strip_content(self, content: str) -> str:
        return content.lstrip("\n")
