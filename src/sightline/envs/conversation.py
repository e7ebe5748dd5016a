"""Conversations with a plain list as history: windows, compaction, sub-agents, retries, edits.

    talk = Conversation(chat, last_images(3))       # shows the newest three images only
    answer = await talk.send([user("...", ref)])
    if talk.num_context_tokens > 6000:
        await talk.compact()                        # history becomes a summary of itself
    note = await talk.branch().send([user("..")])   # a side question that `talk` does not remember
    answer = await talk.retry()                     # another answer to the same prompt
    talk.history[2] = user("...")                   # anything may be edited

If a prompt extends the last one, only the new messages are sent. Otherwise the whole prompt is
sent, and the trace forks where it differs.

A window is a pure function that maps a history to the messages of the prompt. After a window drops
messages, the engine computes the whole prompt again. A larger `step` makes this rarer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from sightline.envs.protocol import Chat, Messages, Tools
from sightline.errors import ConfigError, EnvironmentFailed
from sightline.message import AssistantMessage, Message, Part, TextPart, join_texts, user

SUMMARIZE = (
    "Summarize this conversation so that you can go on from your summary alone: the task, what "
    "was seen and done, and what is left to do."
)
SUMMARY_HEAD = "Summary of what happened so far:\n"


Window = Callable[[Sequence[Message]], list[Message]]

IMAGE_PLACEHOLDER = "[earlier image]"


def last_images(count: int, instead: str = IMAGE_PLACEHOLDER, step: int = 1) -> Window:
    """Show at most the newest `count` images, and the text `instead` for each older one.

    A video counts as an image. Images are dropped `step` at a time, so that between
    `count - step + 1` and `count` are shown.
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
    """Show at most the newest `count` turns. A turn is an answer with the messages before it.

    Messages without an answer yet count as a turn. The first system messages are kept, and the
    user's first message too unless `keep_task` is False. If the oldest turn begins with a tool
    result, the answer that made the call is shown before it.
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
    """Return how many of `num` to drop, in multiples of `step`, to keep at most `count`."""
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


class Conversation:
    """Continues `chat` on its own branch. `windows` are applied in order."""

    def __init__(self, chat: Chat, *windows: Window) -> None:
        self._chat = chat.branch()
        self._windows = windows
        self.history = self._chat.history
        """All messages, including those that windows hide. You may edit the list."""
        self._shown = list(self.history)
        """The last prompt and its answer."""

    @property
    def calls(self) -> list[int]:
        """Indices in `Outcome.per_turn` of the model calls made here."""
        return self._chat.calls

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in the last prompt and its answer."""
        return self._chat.num_context_tokens

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        """Append messages to the history, show the model a window of it, and return its answer."""
        return await self._ask([*self.history, *await self._chat.messages(new_messages)], tools)

    async def _ask(self, history: list[Message], tools: Tools | None) -> AssistantMessage:
        prompt = history
        for window in self._windows:
            prompt = window(prompt)
        num_shown = len(self._shown)
        if num_shown < len(prompt) and prompt[:num_shown] == self._shown:
            answer = await self._chat.send(prompt[num_shown:], tools=tools)
        else:
            answer = await self._chat.ask(prompt, tools=tools)
        message = answer.as_message()
        self.history = [*history, message]
        self._shown = [*prompt, message]
        return answer

    async def retry(self, *, tools: Tools | None = None) -> AssistantMessage:
        """Replace the last answer in the history with a new one. Both stay in the trace."""
        if not self.history or self.history[-1].role != "assistant":
            raise EnvironmentFailed("retry() was called before any answer", "call send() first")
        return await self._ask(self.history[:-1], tools)

    async def compact(self, instruction: str = SUMMARIZE) -> str:
        """Ask for a summary on a branch, and continue from the opening and the summary.

        The opening is the system messages and the user's first message.
        """
        summary = (await self.branch().send([user(instruction)])).text
        self.history = [*opening(self.history), user(SUMMARY_HEAD + summary)]
        return summary

    def branch(self, history: Sequence[Message] | None = None) -> Conversation:
        """Return a conversation that starts from a copy of this history, or from `history`.

        Conversations may run concurrently.
        """
        branch = Conversation(self._chat, *self._windows)
        branch.history = list(self.history if history is None else history)
        return branch
