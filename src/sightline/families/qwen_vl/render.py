"""Renders, bridges and parses in the chat format of a checkpoint, token for token its template.

What the template would drop without a word is refused with its path. The formats themselves are
in `formats/`; here is what they share: reading messages, spans, and what a bridge refuses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sightline.errors import FamilyError, MediaRefused, MessageError
from sightline.families.protocol import Family
from sightline.families.qwen_vl.formats import (
    ChatFormat,
    ImageCounter,
    RenderContext,
    select_chat_format,
)
from sightline.message import (
    ROLES,
    AssistantMessage,
    ImageResolver,
    Message,
    text,
    to_message,
)
from sightline.render import Bridged, Emitter, Refused, Rendered, Tokenizer
from sightline.render.message_fields import check_message_list, get_field, list_image_paths
from sightline.render.protocol import Messages, Tools

_IMAGE_ROLES = ("user", "tool")
# A policy that could say the marks around an image could write a prompt that reads as if an image
# stood there.
_MEDIA_MARKS = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip


class QwenVLRenderer:
    """Stateless but for the family's caches."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        resolver: ImageResolver,
        vocab_size: int,
        chat_format: ChatFormat,
        numbers_images: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._resolver = resolver
        self._format = chat_format
        self._numbers_images = numbers_images
        self.format_name = chat_format.name
        self.vocab_size = vocab_size
        self.stop_token_ids = chat_format.stop_token_ids
        marks = [tokenizer.find_token_id(mark) for mark in _MEDIA_MARKS]
        self.pad_token_ids = tuple(mark for mark in marks if mark is not None)

    @classmethod
    def load(
        cls, path: Path, family: Family, resolver: ImageResolver, numbers_images: bool = False
    ) -> QwenVLRenderer:
        tokenizer = Tokenizer(path)
        config = json.loads((path / "config.json").read_text())
        vocab_size = int((config.get("text_config") or config)["vocab_size"])
        if tokenizer.vocab_size > vocab_size:
            raise FamilyError(
                f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
                "use the tokenizer that belongs to the checkpoint",
            )
        chat_format = select_chat_format(path, config, tokenizer, family)
        return cls(tokenizer, family, resolver, vocab_size, chat_format, numbers_images)

    def messages(self, messages: Messages) -> list[Message]:
        read = self.read(messages)
        self._format.check_order(read)
        return read

    def read(self, messages: Messages) -> list[Message]:
        check_message_list(messages, "messages")
        if not messages:
            raise MessageError.at("messages", "empty", "pass one message or more")
        return [self._read(m, f"messages[{i}]") for i, m in enumerate(messages)]

    def render(
        self, messages: Messages, tools: Tools | None = None, generation_prompt: bool = True
    ) -> Rendered:
        self._format.check_tools(tools)
        read = self.messages(messages)
        self._format.check_question(read)
        context = RenderContext(
            read,
            last_query=self._format.last_query(read),
            image_counter=ImageCounter(self._numbers_images),
        )
        emitter = Emitter(self._tokenizer)
        # Where no message is part of the head, the first message's span holds it.
        first = self._format.emit_head(emitter, context, tools)
        for _ in range(first):
            emitter.end_message(0)
        self._emit(emitter, context, first, emitter.position if first else 0)
        if generation_prompt:
            self._emit_header(emitter)
        return emitter.rendered()

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools | None = None,
    ) -> Bridged | Refused:
        """`tools` stand in the prompt already, so nothing is emitted for them.

        A turn that was cut off, or that ended with another stop token, is closed first.
        """
        check_message_list(new_messages, "new_messages")
        reason = self._refusal(prompt_ids, completion_ids, new_messages)
        if reason is not None:
            return Refused(reason)
        read = [self._read(m, f"new_messages[{i}]") for i, m in enumerate(new_messages)]
        reason = self._format.find_rewrite(prompt_ids, _strip_stop(completion_ids, self), read)
        if reason is not None:
            return Refused(reason)
        start = len(prompt_ids) + len(completion_ids)
        emitter = Emitter(self._tokenizer, start)
        if len(completion_ids) == 0 or completion_ids[-1] not in self.stop_token_ids:
            self._format.close_cut_turn(emitter, completion_ids)
        if len(completion_ids) == 0 or completion_ids[-1] != self._format.im_end:
            emitter.special(self._format.im_end)
        emitter.text("\n")
        image_counter = ImageCounter(self._numbers_images)
        if self._numbers_images:
            image_counter.count = self._format.count_images(prompt_ids)
        self._emit(emitter, RenderContext(read, is_new=True, image_counter=image_counter), 0, start)
        self._emit_header(emitter)
        return emitter.bridged()

    def _refusal(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new_messages: Messages
    ) -> str | None:
        roles = [get_field(message, "role") for message in new_messages]
        if not roles:
            return "no_new_messages"
        if any(role not in ROLES for role in roles):
            return "unknown_role"
        if "assistant" in roles:
            return "assistant_among_new"
        if "system" in roles:
            return "system_among_new"
        header = self._format.header
        if list(prompt_ids[-len(header) :]) != header:
            return "prompt_without_header"
        if not set(completion_ids[:-1]).isdisjoint(self.stop_token_ids):
            return "stop_inside_completion"
        if not set(completion_ids).isdisjoint(self.pad_token_ids):
            return "media_in_completion"
        if len(completion_ids) and completion_ids[-1] in self.stop_token_ids:
            return self._format.find_unclosed(completion_ids)
        return None

    def parse(self, completion_ids: Sequence[int]) -> AssistantMessage:
        """The message up to the first stop token.

        Tool calls are taken out of the content when all of them are well formed. If one is not,
        everything stays in the content as it was said, and `malformed_calls` names what is not.
        """
        ids = [int(token) for token in completion_ids]
        stop = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), None)
        said = self._format.read(ids[:stop])
        return AssistantMessage(
            role="assistant",
            content=text(said.content),
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
            malformed_calls=said.malformed_calls,
            stopped=stop is not None,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _read(self, message: Message | dict[str, Any], path: str) -> Message:
        where = list_image_paths(message, path)
        role = get_field(message, "role")
        if where and not self._family.shows_images:
            raise MessageError.at(
                where[0],
                "an image, and this checkpoint has no vision tower",
                "use a vision-language checkpoint",
            )
        if where and role in ROLES and role not in _IMAGE_ROLES:
            raise MessageError.at(
                where[0],
                f"an image in a message of the role {role}, which this chat format cannot show",
                "put it into a user message",
            )
        read = to_message(message, self._resolver, path)
        self._format.check_message(read, path)
        for image_path, ref in zip(where, read.images, strict=True):
            try:
                self._family.item(ref)
            except MediaRefused as error:
                raise MediaRefused(f"{image_path}: {error.problem}", error.fix) from error
        return read

    def _emit(self, emitter: Emitter, context: RenderContext, first: int, start: int) -> None:
        """Emits from `first` on; the first span begins at `start`, which may be behind us."""
        for i in range(first, len(context.messages)):
            self._format.emit(emitter, context, i)
            emitter.end_message(start)
            start = emitter.position

    def _emit_header(self, emitter: Emitter) -> None:
        for token in self._format.header:
            emitter.special(token)


def _strip_stop(completion_ids: Sequence[int], renderer: QwenVLRenderer) -> Sequence[int]:
    if len(completion_ids) and completion_ids[-1] in renderer.stop_token_ids:
        return completion_ids[:-1]
    return completion_ids
