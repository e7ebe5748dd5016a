"""Formats that think: reasoning between `<think>` and `</think>`, and its fate in history.

A template shows the reasoning of the turns since the last user who asked, and drops what came
before. So a new question rewrites history, and the bridge refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sightline.families.protocol import Family
from sightline.families.qwen_vl.formats.base import ChatFormat, RenderContext
from sightline.message import Message
from sightline.render import Emitter, Tokenizer

THINK, END_THINK = "<think>", "</think>"
HISTORY_REWRITTEN = "history_rewritten"
STOP_IN_REASONING = "stop_in_reasoning"


class ReasoningFormat(ChatFormat):
    """Reasoning by the rule of Qwen3: a turn that is not the last shows its block only when it
    holds something."""

    takes_reasoning = True
    opens_reasoning: ClassVar[bool] = False
    """Whether the header of a turn already opens the block."""
    keeps_empty_reasoning: ClassVar[bool] = False
    """Whether a turn since the last question shows its block even when it is empty."""
    not_carried = (
        *ChatFormat.not_carried,
        "reasoning of turns before the last question",
        "newlines around reasoning, and before the content that follows it",
    )

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        self._think = tokenizer.token_id(THINK)
        self._think_end = tokenizer.token_id(END_THINK)
        super().__init__(tokenizer, family)

    def make_header(self) -> list[int]:
        header = super().make_header()
        if self.opens_reasoning:
            header += [self._think, *self._tokenizer.encode("\n")]
        return header

    def trim(self, reasoning: str) -> str:
        return reasoning.strip("\n")

    def lead(self, content: str) -> str:
        """Content as it follows a block."""
        return content.lstrip("\n")

    def said(self, message: Message) -> tuple[str, str]:
        """Reasoning and content. Where no reasoning is given, the template reads the content."""
        content = "".join(getattr(part, "text", "") for part in self.parts(message))
        if message.reasoning is not None or END_THINK not in content:
            return message.reasoning or "", content
        reasoning = content.split(END_THINK)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
        return reasoning, content.split(END_THINK)[-1].lstrip("\n")

    def emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        reasoning, content = self.said(message)
        is_shown = i > context.last_query and (
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
            emitter.text(self.trim(reasoning) + "\n")
            emitter.special(self._think_end)
            emitter.text("\n\n" + self.lead(content))
        else:
            emitter.begin_trained()
            emitter.text(content)
        self.emit_calls(emitter, message.tool_calls, self.before_call(content))

    def before_call(self, content: str) -> str:
        return "\n" if content else ""

    # -- bridging

    def find_rewrite(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new: Sequence[Message]
    ) -> str | None:
        said = [int(token) for token in completion_ids]
        has_block = self.opens_reasoning or self._think in said or self._think_end in said
        if any(map(self.is_question, new)):
            # Blocks in the prompt are of turns since the last question: older ones are dropped.
            return HISTORY_REWRITTEN if has_block or self._think in prompt_ids else None
        if has_block and not self.keeps_empty_reasoning and not self.split(said)[0]:
            return HISTORY_REWRITTEN
        return None

    def find_unclosed(self, completion_ids: Sequence[int]) -> str | None:
        return STOP_IN_REASONING if self._is_reasoning_open(completion_ids) else None

    def _is_reasoning_open(self, completion_ids: Sequence[int]) -> bool:
        said = list(completion_ids)
        opened = self.opens_reasoning or self._think in said
        return opened and self._think_end not in said

    def close_cut_turn(self, emitter: Emitter, completion_ids: Sequence[int]) -> None:
        if not self._is_reasoning_open(completion_ids):
            return
        if not self._tokenizer.decode(list(completion_ids[-1:])).endswith("\n"):
            emitter.text("\n")
        emitter.special(self._think_end)
        emitter.text("\n\n")

    # -- reading back

    def split(self, said: list[int]) -> tuple[str | None, list[int]]:
        start = 0
        if not self.opens_reasoning or said[:1] == [self._think]:
            if self._think not in said:
                return None, said
            start = said.index(self._think) + 1
            if self._tokenizer.decode(said[: start - 1]).strip():
                return None, said
        end = said.index(self._think_end, start) if self._think_end in said[start:] else len(said)
        reasoning = self.trim(self._tokenizer.decode(said[start:end]))
        rest = said[end + 1 :]
        return reasoning or None, rest

    def strip(self, content: str) -> str:
        return self.lead(content)
