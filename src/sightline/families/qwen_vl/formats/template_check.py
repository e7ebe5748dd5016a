"""Conversations that tell chat formats apart, and the first place where a template differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from sightline.families.protocol import Family
from sightline.families.qwen_vl.formats.base import (
    ChatFormat,
    ImageCounter,
    RenderContext,
    to_template_message,
)
from sightline.media import MediaRef
from sightline.message import ImagePart, Message, TextPart, ToolCall, assistant, system, user
from sightline.render import ChatTemplate, Emitter, TemplateError, Tokenizer
from sightline.render.protocol import Tools

_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks \u00e9",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "wait"}},
)
_ARGUMENTS = '{"at": "a \\"b\\"\\n c", "n": 3, "deep": {"x": [1, true, null]}, "yes": true}'
_REF = MediaRef(digest="0" * 64, mime="image/png", width=64, height=96, nbytes=1)


@dataclass(frozen=True, slots=True)
class ProbeConversation:
    about: str
    messages: tuple[Message, ...]
    tools: Tools | None = None
    generation_prompt: bool = True
    spells_marks: bool = False
    """Whether a text spells a mark, which stays text here and becomes the mark there."""


def build_probes(chat_format: ChatFormat, family: Family) -> Iterator[ProbeConversation]:
    """Short conversations with everything that the format can express."""
    ask, answer = user(" two\nlines \n"), assistant("\n\nfine\n ")
    yield ProbeConversation("a question", (user("hi"),))
    yield ProbeConversation("a system message", (system(" be brief\n"), ask, answer, user("")))
    yield ProbeConversation("an answer", (ask, answer), generation_prompt=False)
    if family.shows_images:
        shown = Message(
            role="user",
            content=(TextPart(" see "), ImagePart(_REF), ImagePart(_REF), TextPart("\nso? ")),
        )
        yield ProbeConversation("images", (shown, answer, user(_REF)))
    if chat_format.takes_tools:
        yield from _tool_probes(family)
    if chat_format.takes_reasoning:
        yield from _reasoning_probes(chat_format)


def _tool_probes(family: Family) -> Iterator[ProbeConversation]:
    call = ToolCall(name="look", arguments=_ARGUMENTS)
    told = Message(role="tool", content=(TextPart(" it is\n"),))
    if family.shows_images:
        told = Message(role="tool", content=(TextPart(" it is\n"), ImagePart(_REF)))
    calls = Message(role="assistant", tool_calls=(call, ToolCall(name="wait", arguments="{}")))
    talks = Message(role="assistant", content=(TextPart("so "),), tool_calls=(call,))
    yield ProbeConversation("tools", (user("hi"),), _TOOLS)
    yield ProbeConversation("tools and a system message", (system(" be brief"), user("hi")), _TOOLS)
    yield ProbeConversation("calls", (user("hi"), calls, told, told, talks, told), _TOOLS)
    yield ProbeConversation(
        "calls in history", (user("hi"), talks, told, assistant("ok"), user("and?"))
    )


def _reasoning_probes(chat_format: ChatFormat) -> Iterator[ProbeConversation]:
    thought = assistant("\nyes", reasoning="\nhm, so \n")
    spelled = assistant("<think>\nwell\n</think>\n\nno")
    empty = assistant("right")
    yield ProbeConversation("reasoning", (user("hi"), thought), generation_prompt=False)
    yield ProbeConversation("no reasoning", (user("hi"), empty), generation_prompt=False)
    yield ProbeConversation(
        "reasoning in history", (user("hi"), thought, user("more"), thought, thought)
    )
    yield ProbeConversation(
        "reasoning in content", (user("hi"), spelled, user("more"), spelled, empty)
    )
    if chat_format.takes_tools:
        told = Message(role="tool", content=(TextPart("ok"),))
        call = ToolCall(name="look", arguments=_ARGUMENTS)
        acts = Message(role="assistant", reasoning="do it", tool_calls=(call,))
        yield ProbeConversation(
            "reasoning before calls", (user("hi"), acts, told, empty, told, acts), _TOOLS
        )
    said = user("<tool_response>\nok\n</tool_response>")
    context = (user("hi"), thought, said, thought)
    yield ProbeConversation("a tool's answer from a user", context, spells_marks=True)


def find_template_difference(
    chat_format: ChatFormat, template: ChatTemplate, tokenizer: Tokenizer, family: Family
) -> str | None:
    """Where the template first writes other tokens than the format, in words."""
    for probe in build_probes(chat_format, family):
        ours = _render_probe(chat_format, tokenizer, probe)
        messages = [to_template_message(m, json.loads) for m in probe.messages]
        try:
            text = template.render(messages, probe.tools, probe.generation_prompt)
        except TemplateError as error:
            return f"for {probe.about} the template fails: {error}"
        theirs = _expand_pads(tokenizer.encode_marked(text), chat_format, family)
        spelled = [tokenizer.decode(ids) for ids in (ours, theirs)]
        if ours != theirs and not (probe.spells_marks and spelled[0] == spelled[1]):
            return f"for {probe.about} {_describe_first_difference(ours, theirs, tokenizer)}"
    return None


def _render_probe(
    chat_format: ChatFormat, tokenizer: Tokenizer, probe: ProbeConversation
) -> list[int]:
    emitter = Emitter(tokenizer)
    messages = probe.messages
    context = RenderContext(
        messages, last_query=chat_format.last_query(messages), image_counter=ImageCounter()
    )
    for i in range(chat_format.emit_head(emitter, context, probe.tools), len(messages)):
        chat_format.emit(emitter, context, i)
    ids = emitter.rendered().token_ids
    return ids + chat_format.header if probe.generation_prompt else ids


def _expand_pads(ids: list[int], chat_format: ChatFormat, family: Family) -> list[int]:
    if not family.shows_images:
        return ids
    count = family.num_tokens(family.item(_REF))
    pad = chat_format.image_pad
    return [token for found in ids for token in [found] * (count if found == pad else 1)]


def _describe_first_difference(ours: list[int], theirs: list[int], tokenizer: Tokenizer) -> str:
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    ends = [tokenizer.decode(ids[same : same + 12]) for ids in (ours, theirs)]
    behind = tokenizer.decode(ours[max(0, same - 6) : same])
    return f"it writes {ends[1]!r} behind {behind!r} where {ends[0]!r} was expected"
