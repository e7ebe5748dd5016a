"""Conversations that tell chat formats apart, and the first place where a template differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sightline.families.protocol import Family
from sightline.families.qwen_vl.render import QwenRenderer
from sightline.media import MediaRef
from sightline.message import ImagePart, Message, TextPart, ToolCall, assistant, system, user
from sightline.render import ChatTemplate, TemplateError, Tokenizer
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
    """What the conversation has that others lack, for errors."""
    messages: tuple[Message, ...]
    tools: Tools | None = None
    generation_prompt: bool = True
    spells_marks: bool = False
    """Whether a text spells a mark: it stays text in our rendering and becomes the mark in the
    template's."""


def build_probes(renderer: QwenRenderer, family: Family) -> Iterator[ProbeConversation]:
    """Short conversations with everything that the format can express."""
    ask, answer = user(" two\nlines \n"), assistant("\n\nfine\n ")
    yield ProbeConversation("a question", (user("hi"),))
    yield ProbeConversation("a system message", (system(" be brief\n"), ask, answer, user("")))
    yield ProbeConversation("an answer", (ask, answer), generation_prompt=False)
    if family.shows_images:
        shows = Message(
            role="user",
            content=(TextPart(" see "), ImagePart(_REF), ImagePart(_REF), TextPart("\nso? ")),
        )
        yield ProbeConversation("images", (shows, answer, user(_REF)))
    if renderer.takes_tools:
        yield from _tool_probes(family)
    if renderer.takes_reasoning:
        yield from _reasoning_probes(renderer)


def _tool_probes(family: Family) -> Iterator[ProbeConversation]:
    call = ToolCall(name="look", arguments=_ARGUMENTS)
    returned = Message(role="tool", content=(TextPart(" it is\n"),))
    if family.shows_images:
        returned = Message(role="tool", content=(TextPart(" it is\n"), ImagePart(_REF)))
    calls = Message(role="assistant", tool_calls=(call, ToolCall(name="wait", arguments="{}")))
    talks = Message(role="assistant", content=(TextPart("so "),), tool_calls=(call,))
    yield ProbeConversation("tools", (user("hi"),), _TOOLS)
    yield ProbeConversation("tools and a system message", (system(" be brief"), user("hi")), _TOOLS)
    yield ProbeConversation(
        "calls", (user("hi"), calls, returned, returned, talks, returned), _TOOLS
    )
    yield ProbeConversation(
        "calls in history", (user("hi"), talks, returned, assistant("ok"), user("and?"))
    )


def _reasoning_probes(renderer: QwenRenderer) -> Iterator[ProbeConversation]:
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
    if renderer.takes_tools:
        returned = Message(role="tool", content=(TextPart("ok"),))
        call = ToolCall(name="look", arguments=_ARGUMENTS)
        acts = Message(role="assistant", reasoning="do it", tool_calls=(call,))
        yield ProbeConversation(
            "reasoning before calls", (user("hi"), acts, returned, empty, returned, acts), _TOOLS
        )
    response = user("<tool_response>\nok\n</tool_response>")
    context = (user("hi"), thought, response, thought)
    yield ProbeConversation("a tool's answer from a user", context, spells_marks=True)


def find_template_difference(
    renderer: QwenRenderer, template: ChatTemplate, tokenizer: Tokenizer, family: Family
) -> str | None:
    """Where the template first writes other tokens than the format, in words."""
    for probe in build_probes(renderer, family):
        ours = renderer.render(probe.messages, probe.tools, probe.generation_prompt).token_ids
        messages = [_to_template_message(m) for m in probe.messages]
        try:
            text = template.render(messages, probe.tools, probe.generation_prompt)
        except TemplateError as error:
            return f"for {probe.about} the template fails: {error}"
        theirs = _expand_pads(tokenizer.encode_marked(text), renderer, family)
        spelled = [tokenizer.decode(ids) for ids in (ours, theirs)]
        if ours != theirs and not (probe.spells_marks and spelled[0] == spelled[1]):
            return f"for {probe.about} {_describe_first_difference(ours, theirs, tokenizer)}"
    return None


def _expand_pads(ids: list[int], renderer: QwenRenderer, family: Family) -> list[int]:
    if not family.shows_images:
        return ids
    count = family.num_tokens(family.item(_REF))
    pad = renderer.image_pad
    return [token for found in ids for token in [found] * (count if found == pad else 1)]


def _describe_first_difference(ours: list[int], theirs: list[int], tokenizer: Tokenizer) -> str:
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    ends = [tokenizer.decode(ids[same : same + 12]) for ids in (ours, theirs)]
    behind = tokenizer.decode(ours[max(0, same - 6) : same])
    return f"it writes {ends[1]!r} behind {behind!r} where {ends[0]!r} was expected"


def _to_template_message(message: Message) -> dict[str, Any]:
    """The message as a chat template gets it."""
    form: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.images:
        form["content"] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.content
        ]
    if message.reasoning is not None:
        form["reasoning_content"] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
    return form
