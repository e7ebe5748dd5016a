"""The chat format: a mark for the role, the content, `[end]`. No reasoning, no newlines between.

A picture is `[look]`, a `[dot]` for each visual token, `[/look]`. Tools stand in front, a line of
JSON each, between `[tools]` and `[end]`. A call is `[call]name[with]arguments[/call]`.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from sightline.families.checkpoint_files import read_vocab_size
from sightline.families.renderer import (
    BaseRenderer,
    ParsedCompletion,
    RenderContext,
)
from sightline.message import ROLES, ImageResolver, ToolCall
from sightline.render import Emitter, Tokenizer
from sightline.render.protocol import Tools
from sightline.wire import MediaItem

from .vision import Pebble


class PebbleRenderer(BaseRenderer):
    takes_reasoning = False

    def __init__(
        self, tokenizer: Tokenizer, family: Pebble, resolver: ImageResolver, vocab_size: int
    ) -> None:
        super().__init__(tokenizer, family, resolver, vocab_size)
        token_id = tokenizer.token_id
        self._roles = {role: token_id(f"[{role}]") for role in ROLES}
        self._tools, self.end_id = token_id("[tools]"), token_id("[end]")
        self._look, self._dot, self._end_look = map(token_id, ("[look]", "[dot]", "[/look]"))
        self._call, self._with, self._end_call = map(token_id, ("[call]", "[with]", "[/call]"))
        self.header = [self._roles["assistant"]]
        self.stop_token_ids = (self.end_id, token_id("[stop]"))
        self.pad_token_ids = (self._dot, self._look, self._end_look)

    @classmethod
    def load(cls, path: Path, family: Pebble, resolver: ImageResolver) -> PebbleRenderer:
        tokenizer = Tokenizer(path)
        return cls(tokenizer, family, resolver, read_vocab_size(path, tokenizer))

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        if tools:
            emitter.special(self._tools)
            for tool in tools:
                emitter.text(json.dumps(tool, ensure_ascii=False) + "\n")
            emitter.special(self.end_id)
        return 0

    def emit_message(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        emitter.special(self._roles[message.role])
        if message.role == "assistant":
            emitter.begin_trained()
        self.emit_content(emitter, context, i)
        for call in message.tool_calls:
            emitter.special(self._call)
            emitter.text(call.name)
            emitter.special(self._with)
            emitter.text(call.arguments)
            emitter.special(self._end_call)
        emitter.special(self.end_id)
        if message.role == "assistant":
            emitter.end_trained()

    def emit_image(self, emitter: Emitter, item: MediaItem) -> None:
        emitter.special(self._look)
        emitter.image(item, self._dot, self._family.num_tokens(item))
        emitter.special(self._end_look)

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        first = ids.index(self._call) if self._call in ids else len(ids)
        calls = self._parse_calls(ids[first:])
        malformed = () if calls or first == len(ids) else (self.decode(ids[first:]),)
        content = self.decode(ids[:first] if calls else ids)
        return ParsedCompletion(content, tool_calls=calls, malformed_calls=malformed)

    def _parse_calls(self, section: list[int]) -> tuple[ToolCall, ...]:
        """Return the calls of a section, or none if any part of it is not a complete call."""
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


def _is_json(arguments: str) -> bool:
    try:
        msgspec.json.decode(arguments)
    except msgspec.MsgspecError:
        return False
    return True
