"""Compose conversations with the checkpoint's chat template, and locate messages in the text."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from sightline.errors import MessageError
from sightline.families.anyvlm.calls import CallFormat
from sightline.families.anyvlm.composed import Composed
from sightline.families.anyvlm.findings import Findings
from sightline.families.anyvlm.reasoning import ReasoningFormat
from sightline.families.renderer import MessageRenderer
from sightline.message import Message, TextPart
from sightline.render import ChatTemplate, TemplateError
from sightline.render.protocol import Tools

_MARKS = "\ue000\ue001\ue002\ue003"
"""Candidates for the character around the number of a text. One that no text contains is used."""
FORMS: tuple[Callable[[str], str], ...] = (
    str, str.strip, lambda text: text.strip("\n"), lambda text: text.lstrip("\n"),
)  # fmt: skip
"""The ways in which templates change texts."""


class TemplateComposer(MessageRenderer):
    """A renderer whose text is written by a template."""

    _template: ChatTemplate
    _findings: Findings
    _part_roles: frozenset[str]
    """The roles whose contents are passed as parts. Other contents without images are passed as
    strings, which some templates require."""
    _header_text: str = ""
    """The text that opens an answer."""
    _answer_prefix: str = ""
    """The text between `_header_text` and an answer in a history."""
    _closing: str
    """The text that ends an answer."""
    reasoning_format: ReasoningFormat | None = None
    call_format: CallFormat | None = None

    def _apply(self, forms: Sequence[dict[str, Any]], prompt: bool, tools: Tools | None) -> str:
        try:
            values: dict[str, Any] = self._findings.template_values
            return self._template.render(forms, tools, prompt, **values)
        except TemplateError as error:
            raise MessageError.at(
                "messages", f"the chat template fails: {error}", "send what the template accepts"
            ) from error

    def _is_in_parts(self, message: Message) -> bool:
        return bool(message.images) or message.role in self._part_roles

    def drop_unwritten(self, message: Message) -> Message:
        """Keep adjacent texts of a content in parts: the template decides how to join them."""
        reduced = super().drop_unwritten(message)
        keeps = len(message.content) > 1 and self._is_in_parts(message)
        return msgspec.structs.replace(reduced, content=message.content) if keeps else reduced

    def _form(self, message: Message, texts: Sequence[str]) -> dict[str, Any]:
        """Return the message for the template, with `texts` in place of its own."""
        left = list(texts)
        thought = {"reasoning_content": left.pop(0)} if message.reasoning else {}
        content: str | list[dict[str, Any]] = left[0] if left else ""
        if self._is_in_parts(message) and (left or message.images):
            content = [
                {"type": "text", "text": left.pop(0)}
                if isinstance(part, TextPart)
                else {"type": "image"}
                for part in message.content or [TextPart("")]
            ]
        return {"role": message.role, "content": content, **thought, **form_calls(message)}

    def _write(self, messages: Sequence[Message], prompt: bool, tools: Tools | None) -> str:
        """Return the text of messages, without locating them in it."""
        return self._apply([self._form(m, list_texts(m)) for m in messages], prompt, tools)

    def _compose(
        self, messages: Sequence[Message], prompt: bool, tools: Tools | None = None
    ) -> Composed:
        texts = list(map(list_texts, messages))
        spoken = [text for of_message in texts for text in of_message]
        mark = next((m for m in _MARKS if not any(m in text for text in spoken)), "")
        if not mark:
            raise MessageError.at("messages", f"the texts contain all of {_MARKS!r}", "remove one")
        firsts = list(accumulate(map(len, texts), initial=0))
        marked = [
            self._form(m, [f"{mark}{n}{mark}" for n in range(firsts[i], firsts[i + 1])])
            for i, m in enumerate(messages)
        ]
        written = self._apply(marked, prompt, tools)
        parts = re.split(f"{mark}(\\d+){mark}", written)
        written_numbers = [int(n) for n in parts[1::2]]
        # A template may drop reasoning, but no other text.
        thoughts = {n for n, m in zip(firsts, messages, strict=False) if m.reasoning}
        dropped = thoughts.difference(written_numbers)
        if written_numbers != [n for n in range(len(spoken)) if n not in dropped]:
            self._refuse_dropped(firsts, [*written_numbers, *dropped])
        counts = [bisect_left(written_numbers, n) for n in firsts]
        text = self._write(messages, prompt, tools)
        split = self.reasoning_format.cut_content if self.reasoning_format else str
        pieces = restore_texts(parts, spoken, text, (*FORMS, split))
        if pieces is None:
            raise MessageError.at(
                "messages",
                "the chat template changes texts in an unknown way",
                "send texts without whitespace at their ends, and reasoning as reasoning_content",
            )
        edges = list(accumulate((len(text) for text, _ in pieces), initial=0))
        raw = list(accumulate(map(len, restore_marks(parts, mark)), initial=0))
        lasts = self._find_lasts(messages, pieces, edges, counts)
        ends: list[int] = []
        last_marks = [f"{mark}{n - 1}{mark}" if n else "" for n in firsts[1:]]
        for i, place in enumerate(self._find_ends(marked, last_marks, written, tools)):
            end = lasts[i] if place is None else move_place(place, raw, edges)
            ends.append(max(end, ends[-1] if ends else 0))
        answers = []
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            first, end_count = counts[i], counts[i + 1]
            if end_count > first:
                is_thought = written_numbers[first] in thoughts
                start = self._find_start(text, edges[2 * first + 1], is_thought)
                end = edges[2 * end_count]
            else:  # calls without content
                most = edges[2 * first + 1] if first < len(written_numbers) else len(text)
                start = end = self._find_call(text, ends[i - 1] if i else 0, most, i)
            if message.tool_calls:
                end = text.index(self._closing, end)
            answers.append((start, end))
        return Composed(text, pieces, ends, answers)

    def _find_start(self, text: str, start: int, is_thought: bool) -> int:
        """Return the start of an answer whose first text begins at `start`."""
        lead = self._answer_prefix
        if is_thought:
            lead = self.reasoning_format.opening if self.reasoning_format else ""
        return start - len(lead) * text.endswith(self._header_text + lead, 0, start)

    def _find_call(self, text: str, least: int, most: int, i: int) -> int:
        """Return the start of an answer that consists of calls only."""
        begin = text.find(self._header_text, least, most)
        if begin >= 0:
            return begin + len(self._header_text)
        begin = text.find(self.call_format.opening, least, most) if self.call_format else -1
        if begin < 0:
            raise MessageError.at(
                f"messages[{i}].tool_calls",
                "these calls cannot be located in the chat template's text",
                "add a text to the message",
            )
        return begin

    def _refuse_dropped(self, counts: list[int], numbers: list[int]) -> None:
        number = next((n for n in range(counts[-1]) if numbers.count(n) != 1), 0)
        i = next(i for i in range(len(counts) - 1) if counts[i] <= number < counts[i + 1])
        raise MessageError.at(
            f"messages[{i}].content",
            "the chat template drops, repeats or moves this text",
            "send content that the template writes",
        )

    def _find_ends(
        self,
        marked: list[dict[str, Any]],
        last_marks: list[str],
        written: str,
        tools: Tools | None,
    ) -> Iterator[int | None]:
        """Yield the end of each message, or None if it cannot be determined.

        That is where the template stops when it gets no further messages. If it then writes earlier
        text differently, it is the end of what it writes after the message's last text.
        """
        for i, last in enumerate(last_marks):
            try:
                alone = self._apply(marked[: i + 1], False, tools)
            except MessageError:
                yield None
                continue
            if written.startswith(alone):
                yield len(alone)
                continue
            ending = alone.rpartition(last)[2] if last and last in alone else None
            place = written.find(last) + len(last) if last in written else -1
            is_same = ending is not None and place >= 0 and written.startswith(ending, place)
            yield place + len(ending or "") if is_same else None

    def _find_lasts(
        self,
        messages: Sequence[Message],
        pieces: list[tuple[str, bool]],
        edges: list[int],
        counts: list[int],
    ) -> list[int]:
        """Return the end of the last text or image of each message."""
        image_ends = [
            edges[i] + match.end()
            for i, (text, is_template) in enumerate(pieces)
            if is_template
            for match in re.finditer(re.escape(self._findings.image_token), text)
        ]
        lasts, num_images = [], 0
        for i, message in enumerate(messages):
            num_images += len(message.images)
            is_shown = bool(message.images) and num_images <= len(image_ends)
            texts = edges[2 * counts[i + 1]] if counts[i + 1] > counts[i] else 0
            lasts.append(max(texts, image_ends[num_images - 1] if is_shown else 0))
        return lasts


def list_texts(message: Message) -> list[str]:
    """Return the texts of a message in order, reasoning first."""
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    if not message.content and not message.tool_calls:
        texts = [""]
    return [message.reasoning, *texts] if message.reasoning else texts


def form_calls(message: Message) -> dict[str, Any]:
    """Return a message's tool calls and call id, as templates take them."""
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": arguments}}
            for c in message.tool_calls
            for arguments in [json.loads(c.arguments)]
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def restore_marks(cut: Sequence[str], mark: str) -> list[str]:
    """Return the parts of a text that was cut at marks, with the marks restored."""
    return [part if i % 2 == 0 else f"{mark}{part}{mark}" for i, part in enumerate(cut)]


def restore_texts(
    cut: list[str], texts: list[str], whole: str, ways: Sequence[Callable[[str], str]]
) -> list[tuple[str, bool]] | None:
    """Return the parts of a text that was cut at marks, with texts in place of the marks.

    Each part says whether it is the template's own. Return None if the template changes a text in
    another way than one of `ways`.
    """
    pieces, at = [(cut[0], True)], len(cut[0])
    for number, following in zip(cut[1::2], cut[2::2], strict=True):
        forms = [way(texts[int(number)]) for way in ways]
        text = next((t for t in forms if whole.startswith(t + following, at)), forms[0])
        pieces += [(text, False), (following, True)]
        at += len(text) + len(following)
    return pieces if "".join(text for text, _ in pieces) == whole else None


def move_place(place: int, raw: list[int], edges: list[int]) -> int:
    """Translate a place in the text with marks to one in the text without them."""
    i = bisect_right(raw, place) - 1
    return edges[i] + place - raw[i]
