"""Windows: which part of a long history the model sees.

A window is a pure function from a history to the messages of the prompt. The trace keeps every turn
as it was sent, and forks at the first turn after a cut: the engine computes that prompt again.
`step` makes cuts rarer; the turns between two cuts are bridged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from sightline.errors import ConfigError
from sightline.message import Message, Part, TextPart, join_texts

Window = Callable[[Sequence[Message]], list[Message]]

IMAGE_PLACEHOLDER = "[earlier image]"


def last_images(count: int, instead: str = IMAGE_PLACEHOLDER, step: int = 1) -> Window:
    """Show the newest `count` images at most, and the text `instead` for each older one.

    A video counts as an image. Images leave `step` at a time: between `count - step + 1` and
    `count` are shown.
    """
    _check_at_least("count", count, 0)
    _check_at_least("step", step, 1)

    def window(history: Sequence[Message]) -> list[Message]:
        num_images = sum(map(_count_shown, history))
        num_left = _num_dropped(num_images, count, step)
        prompt = []
        for message in history:
            num_gone = min(num_left, _count_shown(message))
            num_left -= num_gone
            prompt.append(_without_images(message, num_gone, instead) if num_gone else message)
        return prompt

    return window


def last_turns(count: int, keep_task: bool = True, step: int = 1) -> Window:
    """Show the newest `count` turns at most: answers, each with the messages before it.

    Messages without an answer yet are a turn too. The first system messages stay, and so does the
    user's first message unless `keep_task` is False. A tool result keeps its call: where the oldest
    turn begins with a result, the calling answer is shown before it.
    """
    _check_at_least("count", count, 1)
    _check_at_least("step", step, 1)

    def window(history: Sequence[Message]) -> list[Message]:
        head = len(opening(history)) if keep_task else _num_system(history)
        starts = [head] + [
            i + 1 for i in range(head, len(history) - 1) if history[i].role == "assistant"
        ]
        cut = _num_dropped(len(starts), count, step)
        start = starts[min(cut, len(starts) - 1)]
        if cut and history[start].role == "tool":
            start -= 1
        return [*history[:head], *history[start:]]

    return window


def opening(history: Sequence[Message]) -> list[Message]:
    """Return the first system messages and the user's first message after them."""
    head = _num_system(history)
    has_task = [message.role for message in history[head : head + 1]] == ["user"]
    return list(history[: head + has_task])


def _num_system(history: Sequence[Message]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda message: message.role == "system", history))


def _num_dropped(num: int, count: int, step: int) -> int:
    """Return how many of `num` to drop, a multiple of `step`, so that at most `count` stay."""
    return min(num, -(-max(num - count, 0) // step) * step)


def _count_shown(message: Message) -> int:
    return len(message.images) + len(message.videos)


def _without_images(message: Message, num_gone: int, instead: str) -> Message:
    """Return the message with its first `num_gone` images replaced."""
    parts = list[Part](message.content)
    images = (i for i, part in enumerate(message.content) if not isinstance(part, TextPart))
    for i in itertools.islice(images, num_gone):
        parts[i] = TextPart(instead)
    return msgspec.structs.replace(message, content=join_texts(parts))


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"a window has {name} = {value}", f"use {least} or more")
