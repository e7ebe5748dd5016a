"""What a renderer promises."""

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
    """One per message. They tile the tokens up to the header of the next assistant turn."""
    trained: list[Span]
    """Per assistant message the tokens that the assistant itself would say, stop token included."""


@dataclass(frozen=True, slots=True)
class Bridged:
    """Only what follows the last prompt and completion."""

    token_ids: list[int]
    slots: list[Slot]
    """At absolute offsets: counted from the start of the prompt."""
    spans: list[Span]
    """One per new message, absolute. The first begins right behind the completion, so it holds
    whatever closes the assistant's turn; the header of the next turn follows the last."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The history cannot be extended token by token; render it whole, and fork."""

    reason: str
    """A short stable name, counted in the metrics, such as `assistant_among_new`."""


class Renderer(Protocol):
    stop_token_ids: tuple[int, ...]
    pad_token_ids: tuple[int, ...]
    """Ids of media and of the marks around them; banned in sampling by every engine and in the
    trainer's softmax. The first fills slots."""
    video_pad_id: int
    """The id that fills slots of videos; -1 where they are not shown."""
    vocab_size: int
    max_model_len: int
    """Tokens that a prompt may have; what cannot fit raises PromptTooLong before it is tokenized.
    0 is any number."""

    def read_conversation(self, messages: Messages) -> list[Message]:
        """A whole conversation in our form, with its images taken into the store.

        Raises MessageError for what the chat format cannot express, an empty list included.
        """
        ...

    def read_messages(self, messages: Messages) -> list[Message]:
        """A part of a conversation in our form: what only the whole can break is not checked."""
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
        """What a completion says; `tools` are those of its prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelled out; for people."""
        ...

    def describe(self) -> list[str]:
        """Which chat format the checkpoint has and why, and what that takes; a line each."""
        ...
