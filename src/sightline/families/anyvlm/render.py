"""Renders by the checkpoint's own chat template, which is data here: jinja in a sandbox.

    messages, their texts replaced by marks ---> template ---> cut at the marks
        what the template wrote: its added tokens become tokens, its image marks what the probe
            found to stand for an image of that size
        what messages say: text, whatever it spells

The template is also given the true texts: where the two do not come to the same string, it does
something to them that cannot be followed, and the conversation is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from sightline.errors import FamilyError, MessageError, PromptTooLong
from sightline.families.anyvlm.findings import Findings
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.renderer import MessageRenderer, ParsedCompletion
from sightline.media import MediaRef
from sightline.message import ImageResolver, Message, TextPart, assistant, system, user
from sightline.render import Bridged, ChatTemplate, Rendered, TemplateError, Tokenizer
from sightline.render.emitter import SHORTEN
from sightline.render.protocol import Tools
from sightline.wire import MediaItem, Slot, Span

_MARKS = "\ue000\ue001\ue002\ue003"
"""Characters of which one, that no text has, stands around the number of a text."""
_FORMS: tuple[Callable[[str], str], ...] = (str, str.strip)
"""What templates do to texts."""
_FIX = "use a checkpoint whose chat template is known, or add a family: docs/adding_a_family.md"


@dataclass
class Composed:
    """What the template makes of a conversation, with what each part of it is."""

    text: str
    """All of it, each image as the template writes it."""
    pieces: list[tuple[str, bool]]
    """Its parts in order, and whether the template wrote them itself."""
    ends: list[int]
    """For each message where it ends in `text`."""
    answers: list[tuple[int, int]]
    """For each message of the assistant where its text begins and ends."""


@dataclass
class TokenRun:
    """Tokens, for each the index in the composed text of what it begins with."""

    tokenizer: Tokenizer
    max_model_len: int
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    slots: list[tuple[int, int, MediaItem]] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)
    _num_chars: int = 0

    def add_text(self, text: str, places: Sequence[int]) -> None:
        self._text.append(text)
        self._places += places

    def add_token(self, token_id: int, place: int, times: int = 1) -> None:
        self.flush()
        self.ids += [token_id] * times
        self.starts += [place] * times

    def flush(self) -> None:
        text, places = "".join(self._text), self._places
        self._text, self._places = [], []
        if not text:
            return
        most = self.max_model_len * self.tokenizer.max_token_chars
        self._num_chars += self.tokenizer.count_chars(text, most)
        if self.max_model_len and self._num_chars > most:
            raise PromptTooLong.at(
                "messages",
                f"{self._num_chars} characters of text or more cannot fit into max_model_len = "
                f"{self.max_model_len} tokens",
                SHORTEN,
            )
        ids, starts = self.tokenizer.encode_with_starts(text)
        self.ids += ids
        # A normalizer may shorten a text: what is behind its end belongs to its last character.
        found = (places[min(start, len(places) - 1)] for start in starts)
        self.starts += accumulate(found, max)

    def find(self, place: int) -> int:
        """The index of the first token that begins at `place` or behind it."""
        return bisect_left(self.starts, place)


class AnyVLMRenderer(MessageRenderer):
    takes_tools = False
    takes_reasoning = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: AnyVLMFamily,
        resolver: ImageResolver,
        template: ChatTemplate,
    ) -> None:
        findings: Findings = family.findings
        super().__init__(tokenizer, family, resolver, findings.vocab_size)
        self._images = family
        self._findings = findings
        self._template = template
        added = sorted(tokenizer.added_tokens, key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, added)) + ")")
        self._takes_parts = self._find_form()
        self.pad_token_ids = (findings.pad_id, *self._find_marks())
        self._read_turns()
        self.bridge_difference = self._find_bridge_difference()
        """Why a new turn cannot be added to tokens; empty where it can."""

    @classmethod
    def load(cls, path: Path, family: AnyVLMFamily, resolver: ImageResolver) -> AnyVLMRenderer:
        tokenizer, template = Tokenizer(path), ChatTemplate.find(path)
        if template is None:
            raise FamilyError(f"{path} has no chat template", "copy it from the checkpoint")
        return cls(tokenizer, family, resolver, template)

    # -- what the template is like, found by trying

    def _find_form(self) -> bool:
        """Whether contents are given as parts; else as strings, which some templates want."""
        for as_parts in (True, False):
            self._takes_parts = as_parts
            try:
                self._compose([user("a"), assistant("b"), user("c")], True)
                return as_parts
            except MessageError as error:
                problem = error.problem
        raise FamilyError(f"probe of the chat template: {problem}", _FIX)

    def _find_marks(self) -> list[int]:
        """Added tokens that stand where an image does, and nowhere else."""
        ref = MediaRef("0" * 64, "image/png", 64, 64, 1)
        shown, plain = (
            set(self._added.findall(self._compose([message], True).text))
            for message in (user(ref, "a"), user("a"))
        )
        around = {self._tokenizer.added_tokens[token] for token in shown - plain}
        return sorted((around | set(self._findings.mark_ids)) - {self._findings.pad_id})

    def _read_turns(self) -> None:
        """How an assistant's turn is opened and closed."""
        asked = self._compose([user("a")], True)
        self._header_text = asked.text[asked.ends[-1] :]
        said = self._compose([user("a"), assistant("b")], False)
        before, (start, end) = said.ends[0], said.answers[0]
        opening = self._header_text or asked.pieces[-1][0]
        if not opening or not said.text.startswith(self._header_text, before):
            raise FamilyError(
                "probe of the chat template: the prompt for an answer ends with "
                f"{self._header_text!r}, and an answer in a history does not begin so",
                _FIX,
            )
        self._answer_prefix = said.text[before + len(self._header_text) : start]
        closing = self._added.match(said.text, end)
        stops = self._findings.stop_ids
        if closing is None or self._tokenizer.added_tokens[closing[0]] not in stops:
            raise FamilyError(
                "probe of the chat template: behind an answer it writes "
                f"{said.text[end : end + 20]!r}, which does not begin with a token that ends a "
                f"turn ({[self._tokenizer.decode([i]) for i in stops]})",
                _FIX,
            )
        self._closing = closing[0]
        self.end_id = self._tokenizer.added_tokens[self._closing]
        self.stop_token_ids = (self.end_id, *(i for i in stops if i != self.end_id))
        run = self._encode(asked, [user("a")])
        # Where nothing opens an answer, what closes the question does.
        self.header = run.ids[run.find(len(asked.text) - len(opening)) :]

    def _find_bridge_difference(self) -> str:
        """Where adding a turn changes what stands before it, or depends on it."""
        ref = MediaRef("0" * 64, "image/png", 64, 64, 1)
        histories = [[user("a")], [user("a"), assistant("b"), user("c", ref)]]
        if self.takes_system:
            histories.append([system("s"), user("a")])
        for new in ([user("n")], [user(ref, "n")], [user("n", ref)]):
            shown = self._compose_new(new)[0]
            added = shown.text[shown.answers[0][1] :]
            for history in histories:
                whole = self._compose([*history, assistant("x"), *new], True).text
                kept = self._compose(history, True).text + self._answer_prefix + "x"
                if whole != kept + added:
                    return f"behind {kept[-40:]!r} it does not write {added[:40]!r}"
        return ""

    @property
    def takes_system(self) -> bool:
        try:
            self._compose([system("s"), user("a")], True)
        except MessageError:
            return False
        return True

    # -- the template

    def _apply(self, messages: Sequence[Message], contents: Sequence[Any], prompt: bool) -> str:
        forms = [
            {"role": message.role, "content": content}
            for message, content in zip(messages, contents, strict=True)
        ]
        try:
            values: dict[str, Any] = self._findings.template_values
            return self._template.render(forms, generation_prompt=prompt, **values)
        except TemplateError as error:
            raise MessageError.at(
                "messages", f"the chat template fails: {error}", "send what it has a place for"
            ) from error

    def _form(self, message: Message, texts: Sequence[str]) -> Any:
        """The content as the template gets it, with these texts in the place of its own."""
        if not message.images and not self._takes_parts:
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

    def _compose(self, messages: Sequence[Message], prompt: bool) -> Composed:
        texts = [
            [p.text for p in m.content if isinstance(p, TextPart)] or ([] if m.content else [""])
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
        written = self._apply(messages, marked, prompt)
        cut = re.split(f"{mark}(\\d+){mark}", written)
        if [int(n) for n in cut[1::2]] != list(range(len(spoken))):
            self._refuse_dropped(counts, [int(n) for n in cut[1::2]])
        true = self._apply(
            messages, [self._form(m, own) for m, own in zip(messages, texts, strict=True)], prompt
        )
        pieces = _restore_texts(cut, spoken, true)
        if pieces is None:
            raise MessageError.at(
                "messages",
                "the chat template changes texts in a way that cannot be followed",
                "send them as the template leaves them, without blanks at their ends",
            )
        edges = list(accumulate((len(text) for text, _ in pieces), initial=0))
        raw = list(accumulate(map(len, _restore(cut, mark)), initial=0))
        lasts = self._find_lasts(messages, pieces, edges, counts)
        ends: list[int] = []
        for i, found in enumerate(self._find_ends(messages, marked, written)):
            end = lasts[i] if found is None else _move(found, raw, edges)
            ends.append(max(end, ends[-1] if ends else 0))
        return Composed(
            true,
            pieces,
            ends,
            [
                (edges[2 * counts[i] + 1], edges[2 * counts[i] + 2])
                for i, message in enumerate(messages)
                if message.role == "assistant"
            ],
        )

    def _refuse_dropped(self, counts: list[int], found: list[int]) -> None:
        lost = next((n for n in range(counts[-1]) if found.count(n) != 1), 0)
        i = next(i for i in range(len(counts) - 1) if counts[i] <= lost < counts[i + 1])
        raise MessageError.at(
            f"messages[{i}].content",
            "the chat template writes this text not once, or not in its place",
            "send what the template has a place for",
        )

    def _find_ends(
        self, messages: Sequence[Message], marked: list[Any], written: str
    ) -> Iterator[int | None]:
        """Where messages end: where the template stops when it is given no more of them; None where
        it then writes something else."""
        for i in range(1, len(messages) + 1):
            try:
                alone = self._apply(messages[:i], marked[:i], False)
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

    def _compose_new(self, new: Sequence[Message]) -> tuple[Composed, list[Message]]:
        """The new messages behind a turn of which nothing but its end is used."""
        messages = [user("a"), assistant("b"), *new]
        return self._compose(messages, True), messages

    # -- tokens

    def _encode(self, composed: Composed, messages: Sequence[Message], start: int = 0) -> TokenRun:
        """The tokens of what stands from `start` on in the composed text."""
        run = TokenRun(self._tokenizer, self.max_model_len)
        items = [self._family.item(ref) for m in messages for ref in m.images]
        shown, at = 0, 0
        for text, is_template in composed.pieces:
            parts = self._added.split(text) if is_template else [text]
            for i, part in enumerate(parts):
                place, at = at, at + len(part)
                if part == self._findings.image_token and i % 2:
                    shown += 1
                    if place >= start:
                        self._add_image(run, items, shown, place)
                elif place < start or not part:
                    continue
                elif i % 2:
                    run.add_token(self._tokenizer.added_tokens[part], place)
                else:
                    run.add_text(part, range(place, at))
        run.flush()
        if shown != len(items):
            raise MessageError.at(
                "messages",
                f"{len(items)} images, of which the chat template writes {shown}",
                "put them into user messages",
            )
        return run

    def _add_image(self, run: TokenRun, items: list[MediaItem], shown: int, place: int) -> None:
        if shown > len(items):
            return
        item = items[shown - 1]
        found, pad = self._images.expansion(item.ref.width, item.ref.height), self._findings.pad
        first = -1
        for text, times in found.pieces:
            if text == pad:
                run.flush()
                first = len(run.ids) if first < 0 else first
                run.add_token(self._findings.pad_id, place, times or self._family.num_tokens(item))
                last = len(run.ids)
                continue
            for i, part in enumerate(self._added.split(text)):
                if i % 2:
                    run.add_token(self._tokenizer.added_tokens[part], place)
                else:
                    run.add_text(part, [place] * len(part))
        run.slots.append((first, last - first, item))

    def render_read(
        self, messages: list[Message], tools: Tools | None, generation_prompt: bool
    ) -> Rendered:
        composed = self._compose(messages, generation_prompt)
        run = self._encode(composed, messages)
        head = self._findings.first_ids
        shift = len(head)
        stops = [shift + run.find(end) for end in composed.ends]
        starts = [0, *stops[:-1]]
        trained = []
        opening = self._header_text + self._answer_prefix
        for start, end in composed.answers:
            is_opened = composed.text.endswith(opening, 0, start)
            first = run.find(start - (len(self._answer_prefix) if is_opened else 0))
            trained.append(Span(shift + first, shift + run.find(end + len(self._closing))))
        slots = [Slot(shift + first, length, item) for first, length, item in run.slots]
        spans = [Span(a, b) for a, b in zip(starts, stops, strict=True)]
        return Rendered([*head, *run.ids], slots, spans, trained)

    def bridge_read(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new: list[Message]
    ) -> Bridged:
        composed, messages = self._compose_new(new)
        start, begin = len(prompt_ids) + len(completion_ids), composed.answers[0][1]
        if len(completion_ids) and completion_ids[-1] == self.end_id:
            begin += len(self._closing)
        run = self._encode(composed, messages, begin)
        stops = [start + run.find(end) for end in composed.ends[2:]]
        spans = [Span(a, b) for a, b in zip([start, *stops[:-1]], stops, strict=True)]
        slots = [Slot(start + first, length, item) for first, length, item in run.slots]
        return Bridged(run.ids, slots, spans)

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        return bool(self.bridge_difference)

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        return ParsedCompletion(self._tokenizer.decode(ids).removeprefix(self._answer_prefix))


def _restore(cut: Sequence[str], mark: str) -> list[str]:
    """The parts of a text that was cut at marks, each mark whole again."""
    return [part if i % 2 == 0 else f"{mark}{part}{mark}" for i, part in enumerate(cut)]


def _restore_texts(cut: list[str], spoken: list[str], true: str) -> list[tuple[str, bool]] | None:
    """The parts of a text that was cut at marks, each mark as the template writes its text, and
    whether they are the template's own; None where it does something else."""
    pieces, at = [(cut[0], True)], len(cut[0])
    for number, behind in zip(cut[1::2], cut[2::2], strict=True):
        forms = [form(spoken[int(number)]) for form in _FORMS]
        text = next((t for t in forms if true.startswith(t + behind, at)), forms[0])
        pieces += [(text, False), (behind, True)]
        at += len(text) + len(behind)
    return pieces if "".join(text for text, _ in pieces) == true else None


def _move(place: int, raw: list[int], edges: list[int]) -> int:
    """A place of the text with marks, in the text with what the marks stand for."""
    i = bisect_right(raw, place) - 1
    return edges[i] + place - raw[i]
