"""The interface of a renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sightline.message import AssistantMessage, ImageResolver, Message
from sightline.render.tokenizer import Tokenizer
from sightline.wire import Slot, Span

Messages = Sequence[Message | dict[str, Any]]
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as tokens. Images are expanded to one pad per visual token."""

    token_ids: list[int]
    slots: list[Slot]
    spans: list[Span]
    """One span per message. Together they cover the tokens up to the next answer's header."""
    trained: list[Span]
    """One span per assistant message: the tokens it samples, including the stop token."""


@dataclass(frozen=True, slots=True)
class Bridged:
    """The tokens that follow a prompt and its completion."""

    token_ids: list[int]
    slots: list[Slot]
    """The slots, at absolute offsets from the start of the prompt."""
    spans: list[Span]
    """One span per new message, at absolute offsets. The first begins after the completion and
    includes the tokens that close its turn. The last is followed by the next turn's header."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal to extend the existing tokens. Render the whole conversation again."""

    reason: str
    """A stable name such as `assistant_among_new`, used in metrics."""


class Renderer(Protocol):
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    pad_token_ids: tuple[int, ...]
    """Ids of media and of the marks around them, banned in sampling and in the trainer's softmax.
    Otherwise a policy could sample marks that make a prompt appear to contain an image. The first
    id fills slots."""
    video_pad_id: int
    """The id that fills video slots. -1 if videos are not supported."""
    vocab_size: int
    max_model_len: int
    """The maximum prompt length. Longer prompts raise PromptTooLong before tokenizing. 0 means no
    limit."""

    def read_conversation(self, messages: Messages) -> list[Message]:
        """Convert a whole conversation to `Message` objects, with its images in the store.

        Raise MessageError for an empty list and for content that the chat format cannot express.
        """
        ...

    def read_messages(
        self, messages: Messages, resolver: ImageResolver | None = None
    ) -> list[Message]:
        """Convert part of a conversation, without the checks for a whole conversation.

        `resolver` replaces the renderer's own.
        """
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
        """Parse a completion. `tools` are the prompt's tools."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the human-readable text of ids, including special tokens."""
        ...

    def describe(self) -> list[str]:
        """Describe the checkpoint's chat format and what it supports, one line each."""
        ...
