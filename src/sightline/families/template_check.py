"""Choose a checkpoint's chat format by its own chat template.

A format matches if our tokens equal the template's tokens for a set of conversations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_vocab_size
from sightline.families.renderer import BaseRenderer, MessageRenderer
from sightline.media import MediaRef
from sightline.message import (
    ImagePart,
    ImageResolver,
    Message,
    TextPart,
    ToolCall,
    VideoPart,
    assistant,
    system,
    user,
    video,
)
from sightline.render import ChatTemplate, Emitter, TemplateError, Tokenizer

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
"""The conversation in which a text contains a mark. The mark stays text in our rendering, but the
template turns it into a token."""

Example = tuple[str, Sequence[Message], dict[str, Any]]
"""A description of a conversation for errors, its messages, and its rendering arguments."""
Renderer = TypeVar("Renderer", bound=BaseRenderer)


def choose_format(
    path: Path,
    formats: Sequence[type[Renderer]],
    family: Any,
    resolver: ImageResolver,
    **options: Any,
) -> Renderer:
    """Return the renderer of the first format that matches the folder's chat template.

    A folder without a template uses the first format. `options` are passed to the format's class.
    """
    tokenizer, template = Tokenizer(path), ChatTemplate.find(path)
    vocab_size = read_vocab_size(path, tokenizer)
    differences = []
    for kind in formats:
        renderer = kind(tokenizer, family, resolver, vocab_size, **options)
        if template is None:
            renderer.format_reason = "the folder has no chat template"
            if others := [other.format_name for other in formats[1:]]:
                renderer.format_reason += (
                    ", and it is the first of its model type. If the checkpoint uses "
                    f"{' or '.join(others)}, copy its chat_template.jinja into the folder"
                )
            return renderer
        if difference := _find_difference(renderer, template):
            differences.append(f"{kind.format_name}: {difference}.")
            continue
        renderer.format_reason = "it produces the same tokens as the folder's chat template"
        if renderer.video_mark and not renderer.video_refusal:
            renderer.video_refusal = _find_video_difference(renderer, template) or ""
        return renderer
    problem = f"{path}: the chat template is not one of this family's. " + " ".join(differences)
    fix = "use the chat template that was published with the checkpoint"
    raise FamilyError(problem, fix)


def build_examples(renderer: BaseRenderer) -> Iterator[Example]:
    """Yield short conversations that cover everything the format can express."""
    family = renderer.family
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
        images = (ImagePart(_REF),) if sees else ()
        returned = Message(role="tool", content=(TextPart(" it is\n"), *images))
        calls = Message(role="assistant", tool_calls=(call, ToolCall(name="wait", arguments="{}")))
        talks = Message(role="assistant", content=(TextPart("so "),), tool_calls=(call,))
        offered = {"tools": _TOOLS}
        yield "tools", [hi], offered
        yield "tools and a system message", [system(" be brief"), hi], offered
        yield "calls", [hi, calls, returned, returned, talks, returned], offered
        yield "calls in history", [hi, talks, returned, assistant("ok"), user("and?")], {}
    if renderer.takes_reasoning:
        yield from _reasoning_examples(renderer, call)


def _reasoning_examples(renderer: BaseRenderer, call: ToolCall) -> Iterator[Example]:
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


def _find_difference(renderer: BaseRenderer, template: ChatTemplate) -> str | None:
    """Describe the first difference between the tokens of the template and the format."""
    tokenizer = renderer.tokenizer
    for about, messages, options in build_examples(renderer):
        rendered_ids = renderer.render(messages, **options).token_ids
        if renderer.openers and not options.get("generation_prompt", True):
            rendered_ids = rendered_ids[:-1]  # templates do not close the last turn
        try:
            text = _render(renderer, template, messages, options)
        except TemplateError as error:
            return f"for {about} the template fails: {error.problem}"
        template_ids = _expand_pads(renderer, tokenizer.encode_marked(text))
        spelled = [tokenizer.decode(ids) for ids in (rendered_ids, template_ids)]
        if rendered_ids != template_ids and not (about == _SPELLED and spelled[0] == spelled[1]):
            return f"for {about} {_describe_difference(renderer, rendered_ids, template_ids)}"
    return None


def _find_video_difference(renderer: BaseRenderer, template: ChatTemplate) -> str | None:
    """Describe the first place where the template does not write a video as the format's mark."""
    clip = video([(_REF, 0.0), (_REF, 0.5)])
    question = user("see ", clip, "\nso? ")
    talk = [question, assistant("fine")]
    if "system" in renderer.image_roles:
        talk.insert(0, Message(role="system", content=question.content))
    if "tool" in renderer.image_roles and renderer.takes_tools:
        talk.append(Message(role="tool", content=question.content))
    rendered_ids = renderer.render(talk).token_ids
    try:
        text = _render(renderer, template, talk, {})
    except TemplateError as error:
        return f"the chat template fails for a video: {error.problem}"
    emitter = Emitter(renderer.tokenizer)
    renderer.emit_video(emitter, renderer.family.steps(clip))
    pads_text = renderer.decode(emitter.rendered().token_ids)
    template_ids = renderer.tokenizer.encode_marked(text.replace(renderer.video_mark, pads_text))
    if rendered_ids == template_ids:
        return None
    return f"in the chat template {_describe_difference(renderer, rendered_ids, template_ids)}"


def _render(
    renderer: BaseRenderer,
    template: ChatTemplate,
    messages: Sequence[Message],
    options: Mapping[str, Any],
) -> str:
    forms = [_to_template_message(m, renderer.lists_tool_content) for m in messages]
    return template.render(forms, **options, **renderer.template_settings)


def _expand_pads(renderer: BaseRenderer, ids: list[int]) -> list[int]:
    family = renderer.family
    if not family.shows_media:
        return ids
    count, pad = family.num_tokens(family.item(_REF)), renderer.pad_token_ids[0]
    return [t for token in ids for t in [token] * (count if token == pad else 1)]


def _describe_difference(renderer: BaseRenderer, rendered: list[int], template: list[int]) -> str:
    before, expected, written = find_split(renderer, rendered, template)
    return f"it writes {written!r} after {before!r}, where {expected!r} was expected"


def find_split(
    renderer: MessageRenderer, rendered: list[int], template: list[int]
) -> tuple[str, str, str]:
    """Return the text before the first difference of two prompts, and each continuation."""
    same = len(os.path.commonprefix([rendered, template]))
    start, stop = max(0, same - 6), same + 12
    parts = (rendered[start:same], rendered[same:stop], template[same:stop])
    before, expected, written = map(renderer.decode, parts)
    return before, expected, written


def _to_template_message(message: Message, lists_tool_content: bool) -> dict[str, Any]:
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
    return form | form_calls(message)


def form_calls(message: Message) -> dict[str, Any]:
    """Return a message's tool calls and call id in the format that templates expect."""
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
