"""Conversations that tell chat formats apart, and the first place where a template differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sightline.families.protocol import Family, ShownStep
from sightline.families.renderer import BaseRenderer
from sightline.media import MediaRef
from sightline.message import (
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    VideoPart,
    assistant,
    system,
    user,
    video,
)
from sightline.render import ChatTemplate, TemplateError, Tokenizer

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

_SPELLED = "a tool's answer from a user"
"""The probe in which a text spells a mark: it stays text in our rendering and becomes the mark in
the template's."""

Probe = tuple[str, Sequence[Message], dict[str, Any]]
"""What a conversation has that others lack, for errors; its messages; and how it is rendered."""


def explain_format(template: ChatTemplate | None, others: Sequence[str]) -> str:
    """Why a checkpoint is taken to speak a format, in words; `others` are the further formats of
    its model type."""
    if template is not None:
        return "it writes the tokens of the folder's chat template"
    if not others:
        return "the folder has no chat template, and its model type knows no other format"
    return (
        "the folder has no chat template, and it is the first of its model type; if the checkpoint "
        f"speaks {' or '.join(others)}, copy its chat_template.jinja into the folder"
    )


def build_probes(renderer: BaseRenderer, family: Family) -> Iterator[Probe]:
    """Short conversations with everything that the format can express."""
    hi, ask, answer = user("hi"), user(" two\nlines \n"), assistant("\n\nfine\n ")
    yield "a question", [hi], {}
    yield "a system message", [system(" be brief\n"), ask, answer, user("")], {}
    yield "an answer", [ask, answer], {"generation_prompt": False}
    if family.shows_media:
        if "system" in renderer.image_roles:
            shows = Message(role="system", content=user("see ", _REF).content)
            yield "an image in a system message", [shows, hi], {}
        yield "images", [user(" see ", _REF, _REF, "\nso? "), answer, user(_REF)], {}
    call = ToolCall(name="look", arguments=_ARGUMENTS)
    if renderer.takes_tools:
        sees = family.shows_media and "tool" in renderer.image_roles
        shown = (ImagePart(_REF),) if sees else ()
        returned = Message(role="tool", content=(TextPart(" it is\n"), *shown))
        calls = Message(role="assistant", tool_calls=(call, ToolCall(name="wait", arguments="{}")))
        talks = Message(role="assistant", content=(TextPart("so "),), tool_calls=(call,))
        offered = {"tools": _TOOLS}
        yield "tools", [hi], offered
        yield "tools and a system message", [system(" be brief"), hi], offered
        yield "calls", [hi, calls, returned, returned, talks, returned], offered
        yield "calls in history", [hi, talks, returned, assistant("ok"), user("and?")], {}
    if renderer.takes_reasoning:
        yield from _reasoning_probes(renderer, call)


def _reasoning_probes(renderer: BaseRenderer, call: ToolCall) -> Iterator[Probe]:
    hi, more, empty = user("hi"), user("more"), assistant("right")
    thought = assistant("\nyes", reasoning="\nhm, so \n")
    spelled = assistant("<think>\nwell\n</think>\n\nno")
    yield "reasoning", [hi, thought], {"generation_prompt": False}
    yield "no reasoning", [hi, empty], {"generation_prompt": False}
    yield "reasoning in history", [hi, thought, more, thought, thought], {}
    yield "reasoning in content", [hi, spelled, more, spelled, empty], {}
    if renderer.takes_tools:
        returned = Message(role="tool", content=(TextPart("ok"),))
        acts = Message(role="assistant", reasoning="do it", tool_calls=(call,))
        context = [hi, acts, returned, empty, returned, acts]
        yield "reasoning before calls", context, {"tools": _TOOLS}
    yield _SPELLED, [hi, thought, user("<tool_response>\nok\n</tool_response>"), thought], {}


@dataclass(frozen=True)
class TemplateCheck:
    """What a renderer is compared with, and how that is asked."""

    renderer: BaseRenderer
    template: ChatTemplate
    tokenizer: Tokenizer
    family: Family
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the template is given beside messages and tools."""
    lists_tool_content: bool = False
    """Whether the template is given the content of every tool message as a list."""

    def find_difference(self) -> str | None:
        """Where the template first writes other tokens than the format, in words."""
        for about, messages, options in build_probes(self.renderer, self.family):
            ours = self.renderer.render(messages, **options).token_ids
            if self.renderer.openers and not options.get("generation_prompt", True):
                ours = ours[:-1]  # templates leave the last turn without its end
            try:
                text = self._render(messages, options)
            except TemplateError as error:
                return f"for {about} the template fails: {error}"
            theirs = self._expand_pads(self.tokenizer.encode_marked(text))
            spelled = [self.tokenizer.decode(ids) for ids in (ours, theirs)]
            if ours != theirs and not (about == _SPELLED and spelled[0] == spelled[1]):
                return f"for {about} {self._describe_difference(ours, theirs)}"
        return None

    def find_video_difference(
        self, mark: str, spell: Callable[[Sequence[ShownStep]], str]
    ) -> str | None:
        """Where the template writes a video otherwise than as `mark`, in words; `spell` is what the
        processor that was published with the checkpoints writes in its place."""
        shown = video([(_REF, 0.0), (_REF, 0.5)])
        asked = user("see ", shown, "\nso? ")
        talk = [asked, assistant("fine")]
        if "system" in self.renderer.image_roles:
            talk.insert(0, Message(role="system", content=asked.content))
        if "tool" in self.renderer.image_roles and self.renderer.takes_tools:
            talk.append(Message(role="tool", content=asked.content))
        ours = self.renderer.render(talk).token_ids
        try:
            text = self._render(talk, {})
        except TemplateError as error:
            return f"the chat template fails for a video: {error}"
        theirs = self.tokenizer.encode_marked(text.replace(mark, spell(self.family.steps(shown))))
        if ours == theirs:
            return None
        return f"in the chat template {self._describe_difference(ours, theirs)}"

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        forms = [_to_template_message(m, self.lists_tool_content) for m in messages]
        return self.template.render(forms, **options, **self.settings)

    def _expand_pads(self, ids: list[int]) -> list[int]:
        if not self.family.shows_media:
            return ids
        count = self.family.num_tokens(self.family.item(_REF))
        pad = self.renderer.pad_token_ids[0]
        return [token for found in ids for token in [found] * (count if found == pad else 1)]

    def _describe_difference(self, ours: list[int], theirs: list[int]) -> str:
        same = 0
        while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
            same += 1
        ends = [self.tokenizer.decode(ids[same : same + 12]) for ids in (ours, theirs)]
        behind = self.tokenizer.decode(ours[max(0, same - 6) : same])
        return f"it writes {ends[1]!r} behind {behind!r} where {ends[0]!r} was expected"


def _to_template_message(message: Message, lists_tool_content: bool) -> dict[str, Any]:
    """The message as a chat template gets it."""
    form: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.refs or (lists_tool_content and message.role == "tool"):
        form["content"] = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
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
