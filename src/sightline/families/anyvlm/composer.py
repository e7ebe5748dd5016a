"""Render conversations with the checkpoint's chat template, and locate messages in the text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from sightline.errors import MessageError
from sightline.families.anyvlm.answers import CallFormat, ReasoningFormat
from sightline.families.anyvlm.findings import Findings
from sightline.families.renderer import MessageRenderer
from sightline.families.template_check import form_calls
from sightline.message import Message, TextPart
from sightline.render import ChatTemplate, Emitter, TemplateError, Tokenizer
from sightline.render.protocol import Tools
from sightline.wire import Span

_MARK = "\ue000"
"""The delimiter of the numbers that replace texts."""
_NUMBER = re.compile(f"{_MARK}(\\d+){_MARK}")
FORMS: tuple[Callable[[str], str], ...] = (
    str, str.strip, lambda text: text.strip("\n"), lambda text: text.lstrip("\n"),
)  # fmt: skip
"""The changes that templates may make to a text."""


@dataclass
class Composed:
    """The rendered text of a conversation, and the positions of its parts."""

    text: str
    """The whole text, with images as the template writes them."""
    pieces: list[tuple[str, bool]]
    """The consecutive parts of `text`, and whether each is the template's own text."""
    ends: list[int]
    """The end of each message in `text`."""
    answers: list[tuple[int, int]]
    """The start and end of each answer, without its header and end-of-turn token."""


class TokenRun(Emitter):
    """An emitter that records the index of each token's first character in the composed text."""

    def __init__(self, tokenizer: Tokenizer, start: int, max_model_len: int) -> None:
        super().__init__(tokenizer, start, max_model_len)
        self._starts: list[int] = []
        self._places: list[int] = []

    def add_text(self, text: str, places: Sequence[int]) -> None:
        self.text(text)
        self._places += places

    def add_token(self, token_id: int, place: int, times: int = 1) -> None:
        self.special(*[token_id] * times)
        self._starts += [place] * times

    def _record(self, starts: list[int]) -> None:
        places, self._places = self._places, []
        # A normalizer may lengthen the text. Clamp such starts to the last character.
        starts_in_text = (places[min(start, len(places) - 1)] for start in starts)
        self._starts += accumulate(starts_in_text, max)

    def find(self, place: int) -> int:
        """Return the position of the first token that starts at or after character `place`."""
        return self._start + bisect_left(self._starts, place)

    def find_spans(self, start: int, ends: Sequence[int]) -> list[Span]:
        """Return the spans of messages that end at `ends`. The first starts at token `start`."""
        return [Span(a, b) for a, b in pairwise([start, *map(self.find, ends)])]


class TemplateComposer(MessageRenderer):
    """A renderer that writes text with a chat template."""

    _template: ChatTemplate
    _findings: Findings
    _part_roles: frozenset[str]
    """The roles whose content is passed as a list of parts. Other roles pass content without images
    as a string, which some templates require."""
    _header_text: str = ""
    """The text that opens an answer."""
    _answer_prefix: str = ""
    """The text between `_header_text` and the content of an earlier answer."""
    _closing: str
    """The text that ends an answer."""
    reasoning_format: ReasoningFormat | None = None
    call_format: CallFormat | None = None

    def _apply(self, forms: Sequence[dict[str, Any]], prompt: bool, tools: Tools | None) -> str:
        try:
            values: dict[str, Any] = self._findings.template_values
            return self._template.render(forms, tools, prompt, **values)
        except TemplateError as error:
            problem = f"the chat template fails: {error.problem}"
            raise MessageError.at("messages", problem, "send what the template accepts") from error

    def _is_in_parts(self, message: Message) -> bool:
        return bool(message.images) or message.role in self._part_roles

    def drop_unwritten(self, message: Message) -> Message:
        """Keep adjacent texts of a part list separate, because the template joins them."""
        reduced = super().drop_unwritten(message)
        keeps = len(message.content) > 1 and self._is_in_parts(message)
        return msgspec.structs.replace(reduced, content=message.content) if keeps else reduced

    def _form(self, message: Message, texts: Sequence[str]) -> dict[str, Any]:
        """Return the message as a template argument, with its texts replaced by `texts`."""
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
        """Return the rendered text of messages, without locating them in it."""
        return self._apply([self._form(m, list_texts(m)) for m in messages], prompt, tools)

    def _compose(
        self, messages: Sequence[Message], prompt: bool, tools: Tools | None = None
    ) -> Composed:
        texts = list(map(list_texts, messages))
        contents = [text for of_message in texts for text in of_message]
        firsts = list(accumulate(map(len, texts), initial=0))
        marked = [
            self._form(m, [f"{_MARK}{n}{_MARK}" for n in range(firsts[i], firsts[i + 1])])
            for i, m in enumerate(messages)
        ]
        written = self._apply(marked, prompt, tools)
        cut = _NUMBER.split(written)
        written_numbers = [int(n) for n in cut[1::2]]
        # A template may drop reasoning, but no other text.
        thoughts = {n for n, m in zip(firsts, messages, strict=False) if m.reasoning}
        dropped = thoughts.difference(written_numbers)
        if written_numbers != [n for n in range(len(contents)) if n not in dropped]:
            self._refuse_dropped(firsts, [*written_numbers, *dropped])
        counts = [bisect_left(written_numbers, n) for n in firsts]
        text = self._write(messages, prompt, tools)
        split = self.reasoning_format.cut_content if self.reasoning_format else str
        pieces = restore_texts(cut, contents, text, (*FORMS, split))
        if pieces is None:
            problem = "the chat template changes texts in an unknown way"
            fix = "send texts without whitespace at their ends, and reasoning as reasoning_content"
            raise MessageError.at("messages", problem, fix)
        edges = list(accumulate((len(text) for text, _ in pieces), initial=0))
        image_ends = [
            edges[i] + match.end()
            for i, (piece, is_template) in enumerate(pieces)
            if is_template
            for match in re.finditer(re.escape(self._findings.image_token), piece)
        ]
        ends, num_images = [0], 0
        for i, message in enumerate(messages):
            num_images += len(message.images)
            end = self._find_end(marked[: i + 1], tools, cut, edges)
            if end is None:  # use the end of its last text or image
                end = max([edges[2 * counts[i + 1]], *image_ends[:num_images]])
            ends.append(max(end, ends[-1]))
        del ends[0]
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
        """Return the start of an answer that has only tool calls."""
        begin = text.find(self._header_text, least, most)
        if begin >= 0:
            return begin + len(self._header_text)
        begin = text.find(self.call_format.opening, least, most) if self.call_format else -1
        if begin < 0:
            problem = "these calls cannot be located in the chat template's text"
            raise MessageError.at(f"messages[{i}].tool_calls", problem, "add a text to the message")
        return begin

    def _refuse_dropped(self, counts: list[int], numbers: list[int]) -> None:
        number = next((n for n in range(counts[-1]) if numbers.count(n) != 1), 0)
        i = next(i for i in range(len(counts) - 1) if counts[i] <= number < counts[i + 1])
        problem = "the chat template drops, repeats or moves this text"
        fix = "send content that the template writes"
        raise MessageError.at(f"messages[{i}].content", problem, fix)

    def _find_end(
        self, marked: list[dict[str, Any]], tools: Tools | None, cut: list[str], edges: list[int]
    ) -> int | None:
        """Return the end of the last of these messages, or None if it cannot be determined.

        The end is found by rendering only these messages and measuring the text after the last
        number. `cut` is the whole conversation split at numbers, and `edges` are its boundaries.
        """
        try:
            *_, number, ending = ["", *_NUMBER.split(self._apply(marked, False, tools))]
        except MessageError:
            return None
        if number and number not in cut[1::2]:
            return None
        at = 2 * cut[1::2].index(number) + 2 if number else 0
        return edges[at] + len(ending) if cut[at].startswith(ending) else None


def list_texts(message: Message) -> list[str]:
    """Return the texts of a message in order, reasoning first."""
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    if not message.content and not message.tool_calls:
        texts = [""]
    return [message.reasoning, *texts] if message.reasoning else texts


def restore_texts(
    cut: list[str], texts: list[str], whole: str, ways: Sequence[Callable[[str], str]]
) -> list[tuple[str, bool]] | None:
    """Return the parts of a text that was split at marks, with the marks replaced by texts.

    The flag of each part is true for the template's own text. Return None if the template changes a
    text in a way that is not in `ways`.
    """
    pieces, at = [(cut[0], True)], len(cut[0])
    for number, following in zip(cut[1::2], cut[2::2], strict=True):
        forms = [way(texts[int(number)]) for way in ways]
        text = next((t for t in forms if whole.startswith(t + following, at)), forms[0])
        pieces += [(text, False), (following, True)]
        at += len(text) + len(following)
    return pieces if "".join(text for text, _ in pieces) == whole else None
