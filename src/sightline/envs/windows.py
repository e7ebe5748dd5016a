"""Windows: what of a long history the model is shown. A policy of the environment.

A window is a pure function from a history to the part of it that is asked. What it takes out is
gone from the prompt only: the trace keeps every turn as it was asked, and the first turn behind a
cut is a fork. A cut costs the window's own tokens, rendered and computed again; `step` makes cuts
rarer, so that the turns between two of them are bridged.
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
    """At most the newest `count` images; in place of an older one stands the text `instead`.

    A video counts as an image. With `step` more than 1 images leave so many at a time: between
    `count - step + 1` and `count` are shown.
    """
    _check_at_least("count", count, 0)
    _check_at_least("step", step, 1)

    def window(history: Sequence[Message]) -> list[Message]:
        num_images = sum(map(_count_shown, history))
        left = _num_dropped(num_images, count, step)
        shown = []
        for message in history:
            gone = min(left, _count_shown(message))
            left -= gone
            shown.append(_without_images(message, gone, instead) if gone else message)
        return shown

    return window


def last_turns(count: int, keep_task: bool = True, step: int = 1) -> Window:
    """At most the newest `count` turns: answers, each with the messages that it answers.

    What is yet to be answered is a turn too. System messages at the beginning stay, and so does
    the first message of the user, unless `keep_task` is False. A result of a tool does not go
    without the call that it answers: where the oldest turn shown begins with one, the answer that
    called is shown before it.
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
    """The system messages at the beginning, and the user's first message behind them."""
    head = _num_system(history)
    is_asked = [message.role for message in history[head : head + 1]] == ["user"]
    return list(history[: head + is_asked])


def _num_system(history: Sequence[Message]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda message: message.role == "system", history))


def _num_dropped(num: int, count: int, step: int) -> int:
    """How many of `num` leave, a multiple of `step`, so that at most `count` stay."""
    return min(num, -(-max(num - count, 0) // step) * step)


def _count_shown(message: Message) -> int:
    return len(message.images) + len(message.videos)


def _without_images(message: Message, gone: int, instead: str) -> Message:
    """The message with the first `gone` of its images replaced."""
    parts = list[Part](message.content)
    images = (i for i, part in enumerate(message.content) if not isinstance(part, TextPart))
    for i in itertools.islice(images, gone):
        parts[i] = TextPart(instead)
    return msgspec.structs.replace(message, content=join_texts(parts))


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"a window with {name} = {value}", f"take at least {least}")
