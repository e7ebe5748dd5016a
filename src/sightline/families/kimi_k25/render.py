"""The chat format of Kimi K2.5, token for token that of its published template.

What the template would drop without a word is refused with its path: images of a system or
assistant message, reasoning of anyone but the assistant. Reasoning in front of the last answer
that calls no tool is left out, as the template leaves it out: a bridge that would have to take
back such tokens is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sightline.errors import FamilyError, MediaRefused, MessageError
from sightline.families.kimi_k25.parse import END_THINK, THINK, CompletionParser
from sightline.families.kimi_k25.tokenizer import load_tokenizer
from sightline.families.kimi_k25.tool_declaration import declare_tools
from sightline.families.kimi_k25.vision import KimiK25Family
from sightline.message import (
    ROLES,
    AssistantMessage,
    ImagePart,
    ImageResolver,
    Message,
    to_message,
)
from sightline.render import Bridged, Emitter, Refused, Rendered, Tokenizer
from sightline.render.message_fields import check_message_list, get_field, list_image_paths
from sightline.render.protocol import Messages, Tools

_IMAGE_ROLES = ("user", "tool")
# Stop tokens beside the end of a turn, where a tokenizer has them.
_OTHER_STOPS = ("[EOS]", "<|endoftext|>")
_VIDEO_PAD = "<|kimi_k25_video_placeholder|>"


class KimiK25Renderer:
    """Renders, bridges and parses. Stateless but for the family's caches.

    `thinking` says whether a turn of the assistant is opened for reasoning, or with reasoning
    that is closed and empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: KimiK25Family,
        resolver: ImageResolver,
        vocab_size: int,
        thinking: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._resolver = resolver
        self.vocab_size = vocab_size
        self.thinking = thinking
        token_id = tokenizer.token_id
        system = token_id("<|im_system|>")
        self._roles = {
            "system": system,
            "tool": system,
            "user": token_id("<|im_user|>"),
            "assistant": token_id("<|im_assistant|>"),
        }
        self._im_middle = token_id("<|im_middle|>")
        self._im_end = token_id("<|im_end|>")
        self._media_begin = token_id("<|media_begin|>")
        self._media_content = token_id("<|media_content|>")
        self._media_end = token_id("<|media_end|>")
        self._media_pad = token_id("<|media_pad|>")
        self._think, self._end_think = self._encode_mark(THINK), self._encode_mark(END_THINK)
        self._assistant = [
            self._roles["assistant"], *tokenizer.encode("assistant"), self._im_middle
        ]  # fmt: skip
        self._header = [*self._assistant, *self._think, *([] if thinking else self._end_think)]
        self.stop_token_ids = (self._im_end, *self._find_token_ids(_OTHER_STOPS))
        self._parser = CompletionParser(tokenizer, self.stop_token_ids, thinking)
        # The marks around an image are banned with the pads: a policy that could say them could
        # write a prompt that reads as if an image stood there.
        self.pad_token_ids = (
            self._media_pad,
            self._media_begin,
            self._media_content,
            self._media_end,
            *self._find_token_ids((_VIDEO_PAD,)),
        )

    def _find_token_ids(self, tokens: Sequence[str]) -> list[int]:
        found = [self._tokenizer.find_token_id(token) for token in tokens]
        return [token_id for token_id in found if token_id is not None]

    def _encode_mark(self, mark: str) -> list[int]:
        """A mark of reasoning: a token where the tokenizer has one, else a text of its own.

        It never joins the text beside it: a sampler is given the mark that opens a turn, and
        what it says next cannot merge with it.
        """
        return self._find_token_ids((mark,)) or self._tokenizer.encode(mark)

    @classmethod
    def load(cls, path: Path, family: KimiK25Family, resolver: ImageResolver) -> KimiK25Renderer:
        tokenizer = load_tokenizer(path)
        config = json.loads((path / "config.json").read_text())
        vocab_size = int((config.get("text_config") or config)["vocab_size"])
        if tokenizer.vocab_size > vocab_size:
            raise FamilyError(
                f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
                "use the tokenizer that belongs to the checkpoint",
            )
        file = path / "tokenizer_config.json"
        described = json.loads(file.read_text()) if file.is_file() else {}
        return cls(tokenizer, family, resolver, vocab_size, bool(described.get("thinking", True)))

    def messages(self, messages: Messages) -> list[Message]:
        read = self.read(messages)
        for i, message in enumerate(read):
            if message.role == "system" and i > 0:
                raise MessageError.at(
                    f"messages[{i}].role", "a system message that is not the first", "put it first"
                )
        return read

    def read(self, messages: Messages) -> list[Message]:
        check_message_list(messages, "messages")
        if not messages:
            raise MessageError.at("messages", "empty", "pass one message or more")
        return [self._read(m, f"messages[{i}]") for i, m in enumerate(messages)]

    def render(
        self, messages: Messages, tools: Tools | None = None, generation_prompt: bool = True
    ) -> Rendered:
        read = self.messages(messages)
        emitter = Emitter(self._tokenizer)
        if tools:
            emitter.special(self._roles["system"])
            emitter.text("tool_declare")
            emitter.special(self._im_middle)
            emitter.text(declare_tools(tools))
            emitter.special(self._im_end)
        # The span of the first message holds the tools.
        self._emit_messages(emitter, read, 0)
        if generation_prompt:
            self._emit_ids(emitter, self._header)
        return emitter.rendered()

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools | None = None,
    ) -> Bridged | Refused:
        """`tools` stand in the prompt already, so nothing is emitted for them.

        A turn that was cut off, or that ended with another stop token, is closed first, and so
        is reasoning that was cut off before it began.
        """
        check_message_list(new_messages, "new_messages")
        said = self.parse(completion_ids)
        reason = self._refusal(prompt_ids, completion_ids, new_messages, said)
        if reason is not None:
            return Refused(reason)
        read = [self._read(m, f"new_messages[{i}]") for i, m in enumerate(new_messages)]
        start = len(prompt_ids) + len(completion_ids)
        emitter = Emitter(self._tokenizer, start)
        if self._parser.is_reasoning_open(completion_ids):
            self._emit_ids(emitter, self._end_think)
        if len(completion_ids) == 0 or completion_ids[-1] != self._im_end:
            emitter.special(self._im_end)
        self._emit_messages(emitter, read, start)
        self._emit_ids(emitter, self._header)
        return emitter.bridged()

    def _refusal(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        said: AssistantMessage,
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
        if list(prompt_ids[-len(self._header) :]) != self._header:
            return "prompt_without_header"
        if not set(completion_ids[:-1]).isdisjoint(self.stop_token_ids):
            return "stop_inside_completion"
        if not set(completion_ids).isdisjoint(self.pad_token_ids):
            return "media_in_completion"
        if said.stopped and self._parser.is_reasoning_open(completion_ids):
            return "stop_inside_reasoning"
        if not said.tool_calls and (said.reasoning or self._has_reasoning(prompt_ids)):
            return "history_rewritten"
        return None

    def _has_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a turn of the assistant in the prompt holds reasoning."""
        ids = np.asarray(prompt_ids)
        header = [*self._assistant, *self._think]
        for start in np.flatnonzero(ids == self._roles["assistant"])[:-1].tolist():
            own = start + len(header)
            # A policy can say the first token of a header; it opens no turn.
            if ids[start:own].tolist() != header:
                continue
            if ids[own : own + len(self._end_think)].tolist() != self._end_think:
                # Said letter by letter, an empty reasoning has other ids.
                said = self._tokenizer.decode(ids[own : own + len(END_THINK)].tolist())
                if not said.startswith(END_THINK):
                    return True
        return False

    def parse(self, completion_ids: Sequence[int]) -> AssistantMessage:
        return self._parser.parse(completion_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    # -- reading

    def _read(self, message: Message | dict[str, Any], path: str) -> Message:
        paths = list_image_paths(message, path)
        role = get_field(message, "role")
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

    # -- emitting

    def _emit_messages(self, emitter: Emitter, messages: list[Message], start: int) -> None:
        """Emits all; the first span begins at `start`, which may be behind us."""
        last = max(
            (i for i, m in enumerate(messages) if m.role == "assistant" and not m.tool_calls),
            default=-1,
        )
        num_calls = 0
        for i, message in enumerate(messages):
            emitter.special(self._roles[message.role])
            emitter.text(message.role)
            emitter.special(self._im_middle)
            if message.role == "assistant":
                self._emit_assistant(emitter, message, i > last, num_calls)
                num_calls += len(message.tool_calls)
            else:
                if message.role == "tool":
                    emitter.text(f"## Return of {message.tool_call_id or ''}\n")
                self._emit_content(emitter, message)
                emitter.special(self._im_end)
            emitter.end_message(start)
            start = emitter.position

    def _emit_assistant(
        self, emitter: Emitter, message: Message, keeps_reasoning: bool, num_calls: int
    ) -> None:
        reasoning = (message.reasoning or "") if keeps_reasoning else ""
        opens = self.thinking or bool(reasoning)
        self._emit_ids(emitter, self._think)
        if opens:
            emitter.begin_trained()
        emitter.text(reasoning)
        self._emit_ids(emitter, self._end_think)
        if not opens:
            emitter.begin_trained()
        self._emit_content(emitter, message)
        if message.tool_calls:
            emitter.special(self._parser.calls_begin)
            for k, call in enumerate(message.tool_calls, start=num_calls):
                emitter.special(self._parser.call_begin)
                emitter.text(call.id or f"functions.{call.name}:{k}")
                emitter.special(self._parser.call_arguments)
                emitter.text(call.arguments)
                emitter.special(self._parser.call_end)
            emitter.special(self._parser.calls_end)
        emitter.special(self._im_end)
        emitter.end_trained()

    def _emit_content(self, emitter: Emitter, message: Message) -> None:
        for part in message.content:
            if isinstance(part, ImagePart):
                item = self._family.item(part.ref)
                emitter.special(self._media_begin)
                emitter.text("image")
                emitter.special(self._media_content)
                emitter.image(item, self._media_pad, self._family.num_tokens(item))
                emitter.special(self._media_end)
                emitter.text("\n")
            else:
                emitter.text(part.text)

    def _emit_ids(self, emitter: Emitter, ids: Sequence[int]) -> None:
        for token_id in ids:
            emitter.special(token_id)


def _check_message(message: Message, path: str) -> None:
    if message.reasoning is not None and message.role != "assistant":
        raise MessageError.at(
            f"{path}.reasoning", f"reasoning of the role {message.role}", "remove it"
        )
    if message.tool_calls and message.role != "assistant":
        raise MessageError.at(
            f"{path}.tool_calls", f"tool calls of the role {message.role}", "remove them"
        )
    try:
        (message.text + (message.reasoning or "")).encode()
    except UnicodeEncodeError:
        raise MessageError.at(
            f"{path}.content", "text with half a surrogate pair", "pass whole characters"
        ) from None
