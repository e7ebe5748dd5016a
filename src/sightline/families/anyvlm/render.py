"""Render with the checkpoint's own chat template, in a jinja sandbox.

    messages, with texts replaced by marks ---> template ---> cut at the marks
        the template's own text: added tokens become tokens, and image tokens become the text that
            the trials found for an image of that size
        texts of messages: always plain text, even if they contain special tokens

The template also renders the real texts. If the two results do not match, the template changes
texts in an unknown way, and the conversation is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

import msgspec

from sightline.errors import FamilyError, MessageError
from sightline.families.anyvlm.answers import (
    TRIED_ANSWER,
    TRIED_CALL,
    TRIED_CALLS,
    TRIED_THOUGHT,
    TRIED_TOOLS,
    Answer,
    BlockKind,
    CallFormat,
    ReasoningFormat,
)
from sightline.families.anyvlm.composer import Composed, TemplateComposer, TokenRun, list_texts
from sightline.families.anyvlm.findings import UNSUPPORTED, Findings
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.renderer import ParsedCompletion
from sightline.families.turn_parsing import check_arguments, encode_tool
from sightline.media import MediaRef
from sightline.message import ImageResolver, Message, TextPart, ToolCall, assistant, system, user
from sightline.render import Bridged, ChatTemplate, Rendered, Tokenizer
from sightline.render.protocol import Tools
from sightline.wire import MediaItem, Slot, Span

_SPEAKERS = frozenset({"system", "user", "assistant"})
_REF = MediaRef("0" * 64, "image/png", 64, 64, 1)
NUM_MESSAGES = 12
"""The length of the longest conversation for which a chat template is tested."""

Addition = tuple[bool, BlockKind, bool]
"""A kind of bridge: whether the prompt shows reasoning, the completion's reasoning kind, and
whether a user message follows."""


def draw_history(num_messages: int, has_calls: bool = False) -> list[Message]:
    """Return a conversation of a user and an assistant with several images and, maybe, calls."""
    answers = [TRIED_CALL, TRIED_ANSWER, assistant("b")] if has_calls else [assistant("b")]
    turns = [[user("a"), *answers], [user("c", _REF), *answers], [user(_REF, "d", _REF), *answers]]
    return [message for _ in range(4) for turn in turns for message in turn][:num_messages]


def remove_images(messages: Sequence[Message]) -> list[Message]:
    return [
        msgspec.structs.replace(m, content=tuple(p for p in m.content if isinstance(p, TextPart)))
        for m in messages
    ]


def _asks(new: Sequence[Message]) -> bool:
    return any(message.role == "user" for message in new)


class AnyVLMRenderer(TemplateComposer):
    format_name = "the checkpoint's chat template"
    format_reason = "its trials passed"

    def __init__(self, tokenizer: Tokenizer, family: AnyVLMFamily, resolver: ImageResolver) -> None:
        findings: Findings = family.findings
        super().__init__(tokenizer, family, resolver, findings.vocab_size)
        self._images = family
        self._findings = findings
        self._template = self.find_template(family.path)
        self._added = tokenizer.added_pattern
        self._part_roles = self._find_part_roles()
        pads = (findings.pad_id, *self._find_marks()) if family.shows_media else ()
        self.pad_token_ids = pads
        self._read_turns()
        self.reasoning_format, self.reasoning_refusal = self._find_reasoning_format()
        self.takes_reasoning = self.reasoning_format is not None
        self.call_format, self.tools_refusal = self._find_call_format()
        self.takes_tools = self.call_format is not None
        self.unsupported_names = frozenset(self._find_names())
        self._appended = self._find_appended()

    @classmethod
    def load(
        cls, path: Path, family: AnyVLMFamily, resolver: ImageResolver | None = None
    ) -> AnyVLMRenderer:
        """Load the renderer of a folder. Messages that only contain refs need no resolver."""
        return cls(Tokenizer(path), family, cast(ImageResolver, resolver))

    @staticmethod
    def find_template(path: Path) -> ChatTemplate:
        template = ChatTemplate.find(path)
        if template is None:
            raise FamilyError(f"{path} has no chat template", "copy it from the checkpoint")
        return template

    # -- trials of the template

    def _find_part_roles(self) -> frozenset[str]:
        for roles in (_SPEAKERS, frozenset[str]()):
            self._part_roles = roles
            try:
                self._compose([user("a"), assistant("b"), user("c")], True)
                return roles
            except MessageError as error:
                problem = error.problem
        raise FamilyError(problem, UNSUPPORTED)

    def _find_marks(self) -> list[int]:
        """Return the added tokens that appear only around images."""
        with_image, plain = (
            set(self._added.findall(self._compose([message], True).text))
            for message in (user(_REF, "a"), user("a"))
        )
        around = {self._tokenizer.added_tokens[token] for token in with_image - plain}
        return sorted((around | set(self._findings.mark_ids)) - {self._findings.pad_id})

    def _read_turns(self) -> None:
        """Find the text and tokens that open and close an answer."""
        question = self._compose([user("a")], True)
        self._header_text = question.text[question.ends[-1] :]
        answer = self._compose([user("a"), assistant("b")], False)
        before, (start, end) = answer.ends[0], answer.answers[0]
        opening = self._header_text or question.pieces[-1][0]
        if not opening or not answer.text.startswith(self._header_text, before):
            raise FamilyError(
                f"a prompt ends with {self._header_text!r}, but an answer in a history does not "
                "begin with it",
                UNSUPPORTED,
            )
        self._answer_prefix = answer.text[before + len(self._header_text) : start]
        closing = self._added.match(answer.text, end)
        stops = self._findings.stop_ids
        if closing is None or self._tokenizer.added_tokens[closing[0]] not in stops:
            raise FamilyError(
                f"after an answer it writes {answer.text[end : end + 20]!r}, which does not begin "
                f"with a stop token ({[self._tokenizer.decode([i]) for i in stops]})",
                UNSUPPORTED,
            )
        self._closing = closing[0]
        self.end_id = self._tokenizer.added_tokens[self._closing]
        self.stop_token_ids = (self.end_id, *(i for i in stops if i != self.end_id))
        run = self._encode(question, [user("a")])
        # Without a header, the end of the question opens the answer.
        self.header = run.ids[run.find(len(question.text) - len(opening)) :]

    def _find_appended(self) -> set[Addition]:
        """Return the kinds of bridge for which the template never changes earlier text."""
        histories = [draw_history(n) for n in range(1, NUM_MESSAGES, 2)]
        added_turns = [[user("n")], [user(_REF, "n")], [user("n", _REF)]]
        answers: list[Answer] = [("none", f"{self._answer_prefix}x", assistant("x"))]
        form = self.reasoning_format
        if self._can_compose([system("s"), user("a")]):
            histories += [[system("s"), *histories[0]], [system("s"), *histories[-1]]]
        if form is not None:
            answers = form.list_answers(self._answer_prefix)
            histories.append([user("a"), TRIED_THOUGHT, user("c")])
        talks: list[tuple[list[Message], Tools | None]] = [(talk, None) for talk in histories]
        if self.takes_tools:
            histories.append([user("a"), TRIED_CALL, TRIED_ANSWER])
            histories.append(draw_history(NUM_MESSAGES, has_calls=True))
            if form is not None:
                thought = msgspec.structs.replace(TRIED_CALL, reasoning="r")
                histories.append([user("a"), thought, TRIED_ANSWER])
            talks += [(talk, TRIED_TOOLS) for talk in histories]
            added_turns += [[TRIED_ANSWER], [TRIED_ANSWER, TRIED_ANSWER]]
        if not self._family.shows_media:
            talks = [(remove_images(talk), tools) for talk, tools in talks]
            added_turns = list(map(remove_images, added_turns))
        tested: set[Addition] = set()
        rewritten: set[Addition] = set()
        for new in added_turns:
            composed = self._compose_new(new)[0]
            added = composed.text[composed.answers[0][1] :]
            for (history, tools), (kind, written, answer) in product(talks, answers):
                prompt = self._write(history, True, tools)
                is_shown = form is not None and form.closing_mark in prompt
                addition = (is_shown, kind, _asks(new))
                rendered = self._write([*history, answer, *new], True, tools)
                tested.add(addition)
                if rendered != prompt + written + added:
                    rewritten.add(addition)
        return tested - rewritten

    def _find_reasoning_format(self) -> tuple[ReasoningFormat | None, str]:
        """Return the reasoning format, or the reason for refusing reasoning."""
        messages = [user("a"), TRIED_THOUGHT]
        try:
            answer = self._compose(messages, False)
        except MessageError as error:
            return None, f"the chat template does not accept it: {error.problem}"
        if len(answer.pieces) != 7:
            return None, "the chat template does not write reasoning"
        start, end = answer.answers[0]
        closing = answer.pieces[4][0]
        turn = answer.text[answer.ends[0] : start]
        form = f"the chat template writes {turn + closing!r} around reasoning"
        if not turn.startswith(self._header_text):
            return None, f"{form}, but a prompt ends with {self._header_text!r}"
        opening = turn.removeprefix(self._header_text)
        opens, closes = self._added.findall(opening), self._added.findall(closing)
        is_opened = not opening and closes and closes[0] in self._answer_prefix
        if len(closes) != 1 or not (is_opened or len(opens) == 1):
            return None, f"{form}, without one added token at each end"
        parsed_form = ReasoningFormat(opening, closing, "".join(opens), closes[0], self._tokenizer)
        run = self._encode(answer, messages)
        turn_ids = run.ids[run.find(answer.ends[0] + len(self._header_text)) : run.find(end)]
        reasoning, lead, rest = parsed_form.split(turn_ids, "")
        if (reasoning, self.decode(rest)) != ("r", f"{lead}b"):
            return None, f"{form}, and the reasoning between cannot be parsed again"
        return parsed_form, ""

    def _find_call_format(self) -> tuple[CallFormat | None, str]:
        """Return the tool call format, or the reason for refusing tools."""
        try:
            offered = self._compose([user("a")], True, TRIED_TOOLS).text
            if offered == self._compose([user("a")], True).text:
                return None, "the chat template does not write tools"
            answer = self._compose([user("a"), TRIED_CALL], False, TRIED_TOOLS)
            written = answer.text[slice(*answer.answers[0])].removeprefix(self._answer_prefix)
            written = written.removeprefix(TRIED_CALL.text)
            answered = [user("a"), TRIED_CALLS, TRIED_ANSWER]
            as_string = self._compose(answered, True, TRIED_TOOLS).text
            self._compose_new([TRIED_ANSWER])
        except MessageError as error:
            problem = f"the chat template does not accept calls and tool messages: {error.problem}"
            return None, problem
        call_form = CallFormat.find(written, self._tokenizer)
        if call_form is None:
            return None, (
                f"the chat template writes a call as {written!r}, which is not a JSON object with "
                "name and arguments between two added tokens"
            )
        roles, self._part_roles = self._part_roles, self._part_roles | {"tool"}
        if not self._can_compose(answered, TRIED_TOOLS, as_string):
            self._part_roles = roles
        return call_form, ""

    def _find_names(self) -> Iterator[str]:
        """Yield the roles for which the template writes a name, or refuses one."""
        talks = [[user("a"), assistant("b"), user("c")]]
        if self._can_compose([system("s"), user("a")]):
            talks.append([system("s"), user("a")])
        if self.takes_tools:
            talks.append([user("a"), TRIED_CALL, TRIED_ANSWER])
        for talk in talks:
            plain = [self._form(m, list_texts(m)) for m in talk]
            expected = self._apply(plain, True, None)
            for i, message in enumerate(talk):
                named = [*plain[:i], plain[i] | {"name": "n"}, *plain[i + 1 :]]
                try:
                    is_ignored = self._apply(named, True, None) == expected
                except MessageError:
                    is_ignored = False
                if not is_ignored:
                    yield message.role

    def _can_compose(
        self, messages: Sequence[Message], tools: Tools | None = None, expected: str = ""
    ) -> bool:
        """Return whether the template accepts the messages, and writes the `expected` text."""
        try:
            return expected in ("", self._compose(messages, True, tools).text)
        except MessageError:
            return False

    def _compose_new(self, new: Sequence[Message]) -> tuple[Composed, list[Message]]:
        """Compose the new messages after a placeholder turn, of which only the end is used."""
        messages = [user("a"), assistant("b"), *new]
        return self._compose(messages, True), messages

    # -- tokens

    def _encode(
        self, composed: Composed, messages: Sequence[Message], offset: int = 0, begin: int = 0
    ) -> TokenRun:
        """Tokenize the composed text starting at character `begin`, after `offset` tokens."""
        run = TokenRun(self._tokenizer, offset, self.max_model_len)
        items = [self._family.item(ref) for m in messages for ref in m.images]
        num_images, at = 0, 0
        for text, is_template in composed.pieces:
            parts = self._added.split(text) if is_template else [text]
            for i, part in enumerate(parts):
                place, at = at, at + len(part)
                if part == self._findings.image_token and i % 2:
                    num_images += 1
                    if place >= begin:
                        self._add_image(run, items, num_images, place)
                elif place < begin or not part:
                    continue
                elif i % 2:
                    run.add_token(self._tokenizer.added_tokens[part], place)
                else:
                    run.add_text(part, range(place, at))
        _ = run.position  # encodes the last text
        if num_images != len(items):
            problem = f"there are {len(items)} images, but the chat template writes {num_images}"
            raise MessageError.at("messages", problem, "put images into user messages")
        return run

    def _add_image(self, run: TokenRun, items: list[MediaItem], shown: int, place: int) -> None:
        if shown > len(items):
            return
        item = items[shown - 1]
        expansion, pad = self._images.expansion(item.ref.width, item.ref.height), self._findings.pad
        first = -1
        for text, times in expansion.pieces:
            if text == pad:
                first = run.position if first < 0 else first
                run.add_token(self._findings.pad_id, place, times)
                length = run.position - first
                continue
            for i, part in enumerate(self._added.split(text)):
                if i % 2:
                    run.add_token(self._tokenizer.added_tokens[part], place)
                else:
                    run.add_text(part, [place] * len(part))
        run.slots.append(Slot(first, length, item))

    def render_read(
        self, messages: list[Message], tools: Tools | None, generation_prompt: bool
    ) -> Rendered:
        for i, tool in enumerate(tools or ()):
            self._refuse_marks(encode_tool(tool, f"tools[{i}]"), f"tools[{i}]")
        composed = self._compose(messages, generation_prompt, tools)
        head = self._findings.first_ids
        run = self._encode(composed, messages, len(head))
        closing = len(self._closing)
        trained = [Span(run.find(a), run.find(b + closing)) for a, b in composed.answers]
        return Rendered([*head, *run.ids], run.slots, run.find_spans(0, composed.ends), trained)

    def bridge_read(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new: list[Message]
    ) -> Bridged:
        composed, messages = self._compose_new(new)
        start, begin = len(prompt_ids) + len(completion_ids), composed.answers[0][1]
        if len(completion_ids) and completion_ids[-1] == self.end_id:
            begin += len(self._closing)
        closing: list[int] = []
        if self.reasoning_format is not None and self.is_reasoning_open(list(completion_ids)):
            unclosed = self.reasoning_format.find_end(list(completion_ids))
            closing = self._tokenizer.encode_marked(unclosed)
        run = self._encode(composed, messages, start + len(closing), begin)
        return Bridged([*closing, *run.ids], run.slots, run.find_spans(start, composed.ends[2:]))

    def check_call(self, call: ToolCall, path: str) -> None:
        check_arguments(call, path)
        arguments = json.dumps(json.loads(call.arguments), ensure_ascii=False)
        self._refuse_marks(call.name + arguments, f"{path}.function")

    def _refuse_marks(self, text: str, path: str) -> None:
        """Refuse special tokens in JSON, which would become tokens in the template's text."""
        if match := self._added.search(text):
            raise MessageError.at(path, f"it contains the special token {match[0]}", "remove it")

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        form = self.reasoning_format
        is_shown = form is not None and form.closing_id in prompt_ids
        kind = "none" if form is None else form.find_kind(ids)
        return (is_shown, kind, _asks(new)) not in self._appended

    def is_reasoning_open(self, ids: list[int]) -> bool:
        return self.reasoning_format is not None and self.reasoning_format.is_open(ids)

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        reasoning, lead, form = "", self._answer_prefix, self.reasoning_format
        if form is not None:
            reasoning, lead, ids = form.split(ids, lead)
        parsed = ParsedCompletion(self.decode(ids).removeprefix(lead))
        if self.call_format is not None:
            parsed = self.call_format.parse(ids, lead)
        return replace(parsed, reasoning=reasoning or None)
