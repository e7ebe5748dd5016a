"""The interface of a renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sightline.message import AssistantMessage, Message
from sightline.wire import Slot, Span

Messages = Sequence[Message | dict[str, Any]]
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model reads it. Ids are expanded: one pad per visual token."""

    token_ids: list[int]
    slots: list[Slot]
    spans: list[Span]
    """One per message. Together they cover the tokens up to the header of the next answer."""
    trained: list[Span]
    """One per assistant message: the tokens that the assistant samples, with the stop token."""


@dataclass(frozen=True, slots=True)
class Bridged:
    """The tokens that follow a prompt and its completion."""

    token_ids: list[int]
    slots: list[Slot]
    """At absolute offsets, counted from the start of the prompt."""
    spans: list[Span]
    """One per new message, absolute. The first begins right after the completion and includes the
    tokens that close its turn. The header of the next turn follows the last."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The existing tokens cannot be extended. Render the whole conversation again."""

    reason: str
    """A stable name such as `assistant_among_new`, counted in the metrics."""


class Renderer(Protocol):
    stop_token_ids: tuple[int, ...]
    pad_token_ids: tuple[int, ...]
    """Ids of media and of the marks around them, banned in sampling and in the trainer's softmax.
    The first fills slots."""
    video_pad_id: int
    """The id that fills slots of videos. -1 if videos are not shown."""
    vocab_size: int
    max_model_len: int
    """The maximum length of a prompt. Longer ones raise PromptTooLong before tokenizing. 0 is no
    limit."""

    def read_conversation(self, messages: Messages) -> list[Message]:
        """Return a whole conversation in our form, with its images in the store.

        Raise MessageError for an empty list and for content that the chat format cannot express.
        """
        ...

    def read_messages(self, messages: Messages) -> list[Message]:
        """Return a part of a conversation in our form, without checks of the whole."""
        ...

    def render(
        self, messages: Messages, tools: Tools | None = None, generation_prompt: bool = True
    ) -> Rendered: ...

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools | None = None,
    ) -> Bridged | Refused: ...

    def parse(self, completion_ids: Sequence[int], tools: Tools | None = None) -> AssistantMessage:
        """Parse a completion. `tools` are those of its prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens, for people."""
        ...

    def describe(self) -> list[str]:
        """Describe the checkpoint's chat format and what it supports, one line each."""
        ...
