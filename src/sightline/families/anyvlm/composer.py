"""Conversations as the checkpoint's own chat template writes them, with what is whose in it."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from sightline.errors import MessageError
from sightline.families.anyvlm.composed import Composed
from sightline.families.anyvlm.findings import Findings
from sightline.families.renderer import MessageRenderer
from sightline.message import Message, TextPart
from sightline.render import ChatTemplate, TemplateError
from sightline.render.protocol import Tools

_MARKS = "\ue000\ue001\ue002\ue003"
"""Characters of which one, that no text has, stands around the number of a text."""
FORMS: tuple[Callable[[str], str], ...] = (str, str.strip)
"""What templates do to texts."""


class TemplateComposer(MessageRenderer):
    """A renderer whose text a template writes."""

    _template: ChatTemplate
    _findings: Findings
    _part_roles: frozenset[str]
    """The roles whose contents are given as parts; else, where they show nothing, as strings, which
    some templates want."""
    _header_text: str
    """What opens an answer."""
    _closing: str
    """What ends one."""

    def _apply(
        self,
        messages: Sequence[Message],
        contents: Sequence[Any],
        prompt: bool,
        tools: Tools | None,
    ) -> str:
        forms = [
            {"role": message.role, "content": content, **form_calls(message)}
            for message, content in zip(messages, contents, strict=True)
        ]
        try:
            values: dict[str, Any] = self._findings.template_values
            return self._template.render(forms, tools, prompt, **values)
        except TemplateError as error:
            raise MessageError.at(
                "messages", f"the chat template fails: {error}", "send what it has a place for"
            ) from error

    def _is_in_parts(self, message: Message) -> bool:
        return bool(message.images) or message.role in self._part_roles

    def drop_unwritten(self, message: Message) -> Message:
        """Of a content in parts the template is to say what it makes of texts side by side."""
        less = super().drop_unwritten(message)
        is_whole = len(message.content) > 1 and self._is_in_parts(message)
        return msgspec.structs.replace(less, content=message.content) if is_whole else less

    def _form(self, message: Message, texts: Sequence[str]) -> Any:
        """The content as the template gets it, with these texts in the place of its own."""
        if not texts and not message.images:
            return ""
        if not self._is_in_parts(message):
            return texts[0]
        left = list(texts)
        if not message.content:
            return [{"type": "text", "text": left[0]}]
        return [
            {"type": "text", "text": left.pop(0)}
            if isinstance(part, TextPart)
            else {"type": "image"}
            for part in message.content
        ]

    def _compose(
        self, messages: Sequence[Message], prompt: bool, tools: Tools | None = None
    ) -> Composed:
        texts = [
            [p.text for p in m.content if isinstance(p, TextPart)]
            or ([] if m.content or m.tool_calls else [""])
            for m in messages
        ]
        spoken = [text for own in texts for text in own]
        mark = next((m for m in _MARKS if not any(m in text for text in spoken)), "")
        if not mark:
            raise MessageError.at("messages", f"a text with all of {_MARKS!r}", "remove one")
        counts = list(accumulate(map(len, texts), initial=0))
        marked = [
            self._form(m, [f"{mark}{n}{mark}" for n in range(counts[i], counts[i + 1])])
            for i, m in enumerate(messages)
        ]
        written = self._apply(messages, marked, prompt, tools)
        cut = re.split(f"{mark}(\\d+){mark}", written)
        if [int(n) for n in cut[1::2]] != list(range(len(spoken))):
            self._refuse_dropped(counts, [int(n) for n in cut[1::2]])
        unmarked = [self._form(m, own) for m, own in zip(messages, texts, strict=True)]
        true = self._apply(messages, unmarked, prompt, tools)
        pieces = restore_texts(cut, spoken, true)
        if pieces is None:
            raise MessageError.at(
                "messages",
                "the chat template changes texts in a way that cannot be followed",
                "send them as the template leaves them, without blanks at their ends",
            )
        edges = list(accumulate((len(text) for text, _ in pieces), initial=0))
        raw = list(accumulate(map(len, restore_marks(cut, mark)), initial=0))
        lasts = self._find_lasts(messages, pieces, edges, counts)
        ends: list[int] = []
        for i, found in enumerate(self._find_ends(messages, marked, written, tools)):
            end = lasts[i] if found is None else move_place(found, raw, edges)
            ends.append(max(end, ends[-1] if ends else 0))
        answers = []
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if counts[i + 1] > counts[i]:
                start, end = edges[2 * counts[i] + 1], edges[2 * counts[i + 1]]
            else:  # calls without a content
                begin = true.find(self._header_text, ends[i - 1] if i else 0)
                start = end = begin + len(self._header_text)
            if message.tool_calls:
                end = true.index(self._closing, end)
            answers.append((start, end))
        return Composed(true, pieces, ends, answers)

    def _refuse_dropped(self, counts: list[int], found: list[int]) -> None:
        lost = next((n for n in range(counts[-1]) if found.count(n) != 1), 0)
        i = next(i for i in range(len(counts) - 1) if counts[i] <= lost < counts[i + 1])
        raise MessageError.at(
            f"messages[{i}].content",
            "the chat template writes this text not once, or not in its place",
            "send what the template has a place for",
        )

    def _find_ends(
        self, messages: Sequence[Message], marked: list[Any], written: str, tools: Tools | None
    ) -> Iterator[int | None]:
        """Where messages end: where the template stops when it is given no more of them; None where
        it then writes something else."""
        for i in range(1, len(messages) + 1):
            try:
                alone = self._apply(messages[:i], marked[:i], False, tools)
            except MessageError:
                yield None
            else:
                yield len(alone) if written.startswith(alone) else None

    def _find_lasts(
        self,
        messages: Sequence[Message],
        pieces: list[tuple[str, bool]],
        edges: list[int],
        counts: list[int],
    ) -> list[int]:
        """Where the last text or image of each message ends."""
        shown = [
            edges[i] + found.end()
            for i, (text, is_template) in enumerate(pieces)
            if is_template
            for found in re.finditer(re.escape(self._findings.image_token), text)
        ]
        lasts, num_images = [], 0
        for i, message in enumerate(messages):
            num_images += len(message.images)
            is_shown = bool(message.images) and num_images <= len(shown)
            texts = edges[2 * counts[i + 1]] if counts[i + 1] > counts[i] else 0
            lasts.append(max(texts, shown[num_images - 1] if is_shown else 0))
        return lasts


def form_calls(message: Message) -> dict[str, Any]:
    """What a message has beside its content, as templates take it."""
    found: dict[str, Any] = {}
    if message.tool_calls:
        found["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": made}}
            for c in message.tool_calls
            for made in [json.loads(c.arguments)]
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def restore_marks(cut: Sequence[str], mark: str) -> list[str]:
    """The parts of a text that was cut at marks, each mark whole again."""
    return [part if i % 2 == 0 else f"{mark}{part}{mark}" for i, part in enumerate(cut)]


def restore_texts(cut: list[str], spoken: list[str], true: str) -> list[tuple[str, bool]] | None:
    """The parts of a text that was cut at marks, each mark as the template writes its text, and
    whether they are the template's own; None where it does something else."""
    pieces, at = [(cut[0], True)], len(cut[0])
    for number, behind in zip(cut[1::2], cut[2::2], strict=True):
        forms = [form(spoken[int(number)]) for form in FORMS]
        text = next((t for t in forms if true.startswith(t + behind, at)), forms[0])
        pieces += [(text, False), (behind, True)]
        at += len(text) + len(behind)
    return pieces if "".join(text for text, _ in pieces) == true else None


def move_place(place: int, raw: list[int], edges: list[int]) -> int:
    """A place of the text with marks, in the text with what the marks stand for."""
    i = bisect_right(raw, place) - 1
    return edges[i] + place - raw[i]
