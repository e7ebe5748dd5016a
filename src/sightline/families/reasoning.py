"""Reasoning between `<think>` and `</think>`, which several chat formats share."""

from __future__ import annotations

import msgspec

from sightline.message import Message
from sightline.render import Tokenizer

THINK, END_THINK = "<think>", "</think>"


def keep_told_reasoning(less: Message, message: Message) -> Message:
    """Return the reduced message `less`, with an empty reasoning that the author gave.

    It keeps a template from looking for reasoning in the content.
    """
    is_told = message.reasoning == "" and END_THINK in message.text
    return msgspec.structs.replace(less, reasoning="") if is_told else less


def split_told_reasoning(reasoning: str | None, content: str) -> tuple[str, str]:
    """Return reasoning and content. Without explicit reasoning, templates search the content."""
    if reasoning is not None or END_THINK not in content:
        return reasoning or "", content
    reasoning = content.split(END_THINK)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
    return reasoning, content.split(END_THINK)[-1].lstrip("\n")


def split_sampled_reasoning(
    ids: list[int], tokenizer: Tokenizer, marks: tuple[int, int, int], is_open: bool = False
) -> tuple[str | None, list[int]]:
    """Return the reasoning of a completion, or None, and the ids after it.

    `marks` open the reasoning, close it, and open a call. `is_open` says that the prompt opens it.
    """
    think, end_think, call = marks
    start = 0
    if not is_open or ids[:1] == [think]:
        if think not in ids:
            return None, ids
        start = ids.index(think) + 1
        if tokenizer.decode(ids[: start - 1]).strip():
            return None, ids
    # A call ends reasoning that is never closed. A call inside a closed block is part of it.
    ends = [mark for mark in (end_think, call) if mark in ids[start:]]
    end = ids.index(ends[0], start) if ends else len(ids)
    return tokenizer.decode(ids[start:end]), ids[end + (ends[:1] == [end_think]) :]
