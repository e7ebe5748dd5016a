"""Reasoning between `<think>` and `</think>`, as several chat formats have it."""

from __future__ import annotations

import msgspec

from sightline.message import Message
from sightline.render import Tokenizer

THINK, END_THINK = "<think>", "</think>"


def keep_told_reasoning(less: Message, message: Message) -> Message:
    """What is `less` of a message, with its reasoning where that is empty and told: it keeps a
    template from looking for reasoning in the content."""
    is_told = message.reasoning == "" and END_THINK in message.text
    return msgspec.structs.replace(less, reasoning="") if is_told else less


def split_told_reasoning(reasoning: str | None, content: str) -> tuple[str, str]:
    """Reasoning and content. Where no reasoning is given, templates read the content."""
    if reasoning is not None or END_THINK not in content:
        return reasoning or "", content
    reasoning = content.split(END_THINK)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
    return reasoning, content.split(END_THINK)[-1].lstrip("\n")


def split_sampled_reasoning(
    ids: list[int], tokenizer: Tokenizer, marks: tuple[int, int, int], is_open: bool = False
) -> tuple[str | None, list[int]]:
    """The reasoning of a completion, and the ids behind it; None where there is no block.

    `marks` begin it, end it, and begin a call; `is_open` says that the prompt begins it.
    """
    think, end_think, call = marks
    start = 0
    if not is_open or ids[:1] == [think]:
        if think not in ids:
            return None, ids
        start = ids.index(think) + 1
        if tokenizer.decode(ids[: start - 1]).strip():
            return None, ids
    # A call ends reasoning that is never closed; before the end of a block it is a draft.
    ends = [mark for mark in (end_think, call) if mark in ids[start:]]
    end = ids.index(ends[0], start) if ends else len(ids)
    return tokenizer.decode(ids[start:end]), ids[end + (ends[:1] == [end_think]) :]
