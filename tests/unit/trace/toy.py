"""A small chat format: letters are tokens, `ab` is one token, images are runs of pads.

A policy may sample `a` and then `b`, which the tokenizer never produces. Rendering such a history
again gives other tokens than were sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sightline.errors import MessageError
from sightline.media import MediaRef
from sightline.message import AssistantMessage, ImagePart, Message, text, to_messages
from sightline.render import Bridged, Refused, Rendered
from sightline.render.protocol import Messages, Tools
from sightline.trace import PolicySpan, Trace, Turn
from sightline.wire import MediaItem, Slot, Span

START, END, NEWLINE, VISION, PAD, TOOLS, AB = range(7)
ROLE = {"system": 7, "user": 8, "assistant": 9, "tool": 10}
LETTER = 100
HEADER = [START, ROLE["assistant"], NEWLINE]
TOOL = [{"type": "function", "function": {"name": "look"}}]


class ToyRenderer:
    stop_token_ids = (END,)
    pad_token_ids = (PAD,)
    vocab_size = 0x110000 + LETTER

    def read_conversation(self, messages: Messages) -> list[Message]:
        if not messages:
            raise MessageError.at("messages", "empty", "pass one message or more")
        return self.read_messages(messages)

    def read_messages(self, messages: Messages, resolver: object = None) -> list[Message]:
        return to_messages(messages, self)

    def resolve(self, url: str, path: str, takes_video: bool) -> MediaRef:
        raise AssertionError(f"{path}: the toy has no store for {url}")

    def render(
        self, messages: Messages, tools: Tools | None = None, generation_prompt: bool = True
    ) -> Rendered:
        ids = [TOOLS, *_letters(str(tools))] if tools else []
        slots, spans, trained = list[Slot](), list[Span](), list[Span]()
        for message in self.read_messages(messages):
            start = spans[-1].stop if spans else 0
            _emit(message, ids, slots, 0)
            spans.append(Span(start, len(ids)))
            if message.role == "assistant":
                trained.append(Span(start + len(HEADER), len(ids) - 1))
        return Rendered(ids + HEADER * generation_prompt, slots, spans, trained)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools | None = None,
    ) -> Bridged | Refused:
        new = self.read_messages(new_messages)
        if any(message.role == "assistant" for message in new):
            return Refused("assistant_among_new")
        if any(message.text.startswith("?") for message in new):
            return Refused("history_rewritten")
        base = len(prompt_ids) + len(completion_ids)
        ids = [NEWLINE] if completion_ids[-1] == END else [END, NEWLINE]
        slots, spans, start = list[Slot](), list[Span](), base
        for message in new:
            _emit(message, ids, slots, base)
            spans.append(Span(start, base + len(ids)))
            start = base + len(ids)
        return Bridged(ids + HEADER, slots, spans)

    def parse(self, completion_ids: Sequence[int], tools: Tools | None = None) -> AssistantMessage:
        stopped = completion_ids[-1] == END
        decoded = self.decode(completion_ids[:-1] if stopped else completion_ids)
        return AssistantMessage(role="assistant", content=text(decoded), stopped=stopped)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("ab" if i == AB else chr(i - LETTER) for i in token_ids)


def _letters(content: str) -> list[int]:
    pieces = [[LETTER + ord(c) for c in piece] for piece in content.split("ab")]
    return [token for i, piece in enumerate(pieces) for token in ([AB] * (i > 0) + piece)]


def _emit(message: Message, ids: list[int], slots: list[Slot], base: int) -> None:
    ids += [START, ROLE[message.role], NEWLINE]
    for part in message.content:
        if isinstance(part, ImagePart):
            ids.append(VISION)
            slots.append(Slot(base + len(ids), part.ref.width, item(part.ref)))
            ids += [PAD] * part.ref.width
        else:
            ids += _letters(part.text)
    ids += [END, NEWLINE]


def item(ref: MediaRef) -> MediaItem:
    return MediaItem(ref=ref, family="toy", grid=(1, 1, ref.width), fingerprint="toy-1")


def picture(number: int) -> MediaRef:
    digest = hashlib.sha256(bytes([number])).hexdigest()
    return MediaRef(digest=digest, mime="image/png", width=1 + number % 3, height=1, nbytes=10)


def digests(slots: Sequence[Slot]) -> list[str | None]:
    return ["pixels-" + slot.item.ref.digest[:8] for slot in slots]


def say(turn: Turn, words: str, stop: bool = True, version: int = 0):
    """Commit the answer of a policy that samples `ab` as two tokens."""
    ids = [LETTER + ord(c) for c in words] + [END] * stop
    return turn.commit(
        ids,
        [-0.5 * (1 + i % 3) for i in range(len(ids))],
        [PolicySpan(0, len(ids), version=version, epoch=0)],
        "stop" if stop else "length",
        digests(turn.slots),
    )


def talk(trace: Trace, *exchanges: tuple[list[Message], str], leaf: int = -1) -> int:
    """Plays exchanges of new messages and answers. Returns the last node's id."""
    for new, words in exchanges:
        leaf = say(trace.extend(leaf, new, ToyRenderer()), words).id
    return leaf
