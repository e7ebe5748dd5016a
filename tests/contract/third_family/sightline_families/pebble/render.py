"""The chat format: a mark for the role, what is said, `[end]`. No reasoning, no newlines between.

A picture is `[look]`, a `[dot]` for each visual token, `[/look]`. Tools stand in front, a line of
JSON each, between `[tools]` and `[end]`; a call is `[call]name[with]arguments[/call]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sightline.errors import FamilyError, MediaRefused, MessageError
from sightline.message import (
    ROLES,
    AssistantMessage,
    ImagePart,
    ImageResolver,
    Message,
    ToolCall,
    text,
    to_message,
)
from sightline.render import Bridged, Emitter, Refused, Rendered, Tokenizer
from sightline.render.message_fields import check_message_list, get_field, list_image_paths
from sightline.render.protocol import Messages, Tools

from .vision import Pebble

_IMAGE_ROLES = ("user", "tool")


class PebbleRenderer:
    """Renders, bridges and parses. Stateless but for the family's cache."""

    def __init__(
        self, tokenizer: Tokenizer, family: Pebble, resolver: ImageResolver, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._resolver = resolver
        self.vocab_size = vocab_size
        token_id = tokenizer.token_id
        self._roles = {role: token_id(f"[{role}]") for role in ROLES}
        self._tools, self._end = token_id("[tools]"), token_id("[end]")
        self._look, self._dot, self._end_look = map(token_id, ("[look]", "[dot]", "[/look]"))
        self._call, self._with, self._end_call = map(token_id, ("[call]", "[with]", "[/call]"))
        self.stop_token_ids = (self._end, token_id("[stop]"))
        # The marks around a picture are banned with the dots: a policy that could say them could
        # write a prompt that reads as if a picture stood there.
        self.pad_token_ids = (self._dot, self._look, self._end_look)

    @classmethod
    def load(cls, path: Path, family: Pebble, resolver: ImageResolver) -> PebbleRenderer:
        tokenizer = Tokenizer(path)
        vocab_size = int(json.loads((path / "config.json").read_text())["vocab_size"])
        if tokenizer.vocab_size > vocab_size:
            raise FamilyError(
                f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
                "use the tokenizer that belongs to the checkpoint",
            )
        return cls(tokenizer, family, resolver, vocab_size)

    def read(self, messages: Messages) -> list[Message]:
        check_message_list(messages, "messages")
        if not messages:
            raise MessageError.at("messages", "empty", "pass one message or more")
        return [self._read(m, f"messages[{i}]") for i, m in enumerate(messages)]

    def messages(self, messages: Messages) -> list[Message]:
        read = self.read(messages)
        for i, message in enumerate(read[1:], start=1):
            if message.role == "system":
                raise MessageError.at(
                    f"messages[{i}].role", "a system message that is not the first", "put it first"
                )
        return read

    def render(
        self, messages: Messages, tools: Tools | None = None, generation_prompt: bool = True
    ) -> Rendered:
        read = self.messages(messages)
        emitter = Emitter(self._tokenizer)
        if tools:
            emitter.special(self._tools)
            for tool in tools:
                emitter.text(json.dumps(tool, ensure_ascii=False) + "\n")
            emitter.special(self._end)
        # The span of the first message holds the tools.
        self._emit_messages(emitter, read, 0)
        if generation_prompt:
            emitter.special(self._roles["assistant"])
        return emitter.rendered()

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools | None = None,
    ) -> Bridged | Refused:
        """`tools` stand in the prompt already, so nothing is emitted for them.

        A turn that was cut off, or that ended with the other stop token, is closed first.
        """
        check_message_list(new_messages, "new_messages")
        reason = self._refusal(prompt_ids, completion_ids, new_messages)
        if reason is not None:
            return Refused(reason)
        read = [self._read(m, f"new_messages[{i}]") for i, m in enumerate(new_messages)]
        start = len(prompt_ids) + len(completion_ids)
        emitter = Emitter(self._tokenizer, start)
        if len(completion_ids) == 0 or completion_ids[-1] != self._end:
            emitter.special(self._end)
        self._emit_messages(emitter, read, start)
        emitter.special(self._roles["assistant"])
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
        if len(prompt_ids) == 0 or prompt_ids[-1] != self._roles["assistant"]:
            return "prompt_without_header"
        if not set(completion_ids[:-1]).isdisjoint(self.stop_token_ids):
            return "stop_inside_completion"
        if not set(completion_ids).isdisjoint(self.pad_token_ids):
            return "media_in_completion"
        return None

    def parse(self, completion_ids: Sequence[int]) -> AssistantMessage:
        """The message up to the first stop token.

        Calls are taken out of the content when all of them are well formed. If one is not,
        everything stays in the content as it was said.
        """
        ids = [int(token) for token in completion_ids]
        stop = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), None)
        said = ids[:stop]
        first = said.index(self._call) if self._call in said else len(said)
        calls = self._calls(said[first:])
        malformed = () if calls or first == len(said) else (self.decode(said[first:]),)
        return AssistantMessage(
            role="assistant",
            content=text(self.decode(said[:first] if calls else said)),
            tool_calls=calls,
            stopped=stop is not None,
            malformed_calls=malformed,
        )

    def _calls(self, section: list[int]) -> tuple[ToolCall, ...]:
        """The calls of a section, or none when any part of it is no whole call."""
        calls: list[ToolCall] = []
        while section:
            if section[0] != self._call or self._end_call not in section:
                return ()
            end = section.index(self._end_call)
            call, section = section[1:end], section[end + 1 :]
            if call.count(self._with) != 1:
                return ()
            middle = call.index(self._with)
            name, arguments = self.decode(call[:middle]), self.decode(call[middle + 1 :])
            if not name or not _is_json(arguments):
                return ()
            calls.append(ToolCall(name=name, arguments=arguments))
        return tuple(calls)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _read(self, message: Message | dict[str, Any], path: str) -> Message:
        paths, role = list_image_paths(message, path), get_field(message, "role")
        if paths and role in ROLES and role not in _IMAGE_ROLES:
            raise MessageError.at(
                paths[0],
                f"an image in a message of the role {role}, which this chat format cannot show",
                "put it into a user message",
            )
        read = to_message(message, self._resolver, path)
        _check_message(read, path)
        for image_path, ref in zip(paths, read.images, strict=True):
            try:
                self._family.item(ref)
            except MediaRefused as error:
                raise MediaRefused(f"{image_path}: {error.problem}", error.fix) from error
        return read

    def _emit_messages(self, emitter: Emitter, messages: list[Message], start: int) -> None:
        """Emits all; the first span begins at `start`, which may be behind us."""
        for message in messages:
            emitter.special(self._roles[message.role])
            if message.role == "assistant":
                emitter.begin_trained()
            self._emit_content(emitter, message)
            for call in message.tool_calls:
                emitter.special(self._call)
                emitter.text(call.name)
                emitter.special(self._with)
                emitter.text(call.arguments)
                emitter.special(self._end_call)
            emitter.special(self._end)
            if message.role == "assistant":
                emitter.end_trained()
            emitter.end_message(start)
            start = emitter.position

    def _emit_content(self, emitter: Emitter, message: Message) -> None:
        for part in message.content:
            if isinstance(part, ImagePart):
                item = self._family.item(part.ref)
                emitter.special(self._look)
                emitter.image(item, self._dot, self._family.num_tokens(item))
                emitter.special(self._end_look)
            else:
                emitter.text(part.text)


def _check_message(message: Message, path: str) -> None:
    if message.reasoning is not None:
        raise MessageError.at(f"{path}.reasoning", "this chat format has none", "remove it")
    if message.tool_calls and message.role != "assistant":
        raise MessageError.at(
            f"{path}.tool_calls", f"tool calls of the role {message.role}", "remove them"
        )
    try:
        message.text.encode()
    except UnicodeEncodeError:
        raise MessageError.at(
            f"{path}.content", "text with half a surrogate pair", "pass whole characters"
        ) from None


def _is_json(arguments: str) -> bool:
    try:
        msgspec.json.decode(arguments)
    except msgspec.MsgspecError:
        return False
    return True
