"""Guarantees of every renderer, on every checkpoint of conftest.

1. Its tokens are those of the chat template, with image pads repeated.
2. Spans cover all tokens, slots cover pads, and only the assistant's tokens train.
3. `bridge` appends to sampled tokens and never changes them.
4. `parse` returns what `render` wrote.

test_renderer_refusals has the refusals.
"""

from __future__ import annotations

import json
import string
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from shards import num_examples

from sightline.errors import MessageError
from sightline.message import (
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    assistant,
    system,
    text,
    user,
)
from sightline.render import Bridged, Refused
from sightline.wire.item import check_slots

# The number of unsuitable random conversations is chance, and the time to draw them depends on
# the machine. Neither should fail a test.
QUIET = [HealthCheck.filter_too_much, HealthCheck.too_slow]
many = settings(max_examples=num_examples(300, 20), deadline=None, suppress_health_check=QUIET)
bridged = settings(max_examples=num_examples(300, 15), deadline=None, suppress_health_check=QUIET)
some = settings(max_examples=num_examples(60, 12), deadline=None, suppress_health_check=QUIET)

# Letters whole and with combining accents, blanks and newlines that merge, quotes, an emoji.
# Without ">" no text spells an added token: there we differ from the template on purpose.
ALPHABET = string.ascii_letters + string.digits + " \n\t.,:;'\"{}<|/\\_-" + "ée\u0301漢字🙂ß"
texts = st.text(ALPHABET, max_size=24)
words = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)
# Here, not where they are drawn from: Hypothesis looks through every strategy that is new to it.
booleans = st.booleans()
image_parts = st.integers(0, 5).map(lambda i: {"type": "image_url", "image_url": i})
text_parts = st.text(ALPHABET, max_size=12).map(lambda t: {"type": "text", "text": t})
part_lists = st.lists(image_parts | text_parts, min_size=1, max_size=4)
reasonings = texts.filter(str.strip)
scalars = texts | st.integers() | booleans | st.none()
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(words, scalars, max_size=2)
call_lists = st.lists(st.tuples(words, st.dictionaries(words, values, max_size=2)), max_size=2)


@st.composite
def parts(draw: st.DrawFn) -> str | list[dict[str, Any]]:
    """The content of a message, as text or as parts with images of conftest's sizes."""
    return draw(texts) if draw(booleans) else draw(part_lists)


@st.composite
def assistants(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if draw(booleans):
        message["reasoning_content"] = draw(reasonings)
    if calls := draw(call_lists):
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return message


asking = {"role": "user", "content": "well?"}
SIDE_BY_SIDE = [{"type": "text", "text": text} for text in ("0 ", "0", "", " 0")]
asked = st.builds(lambda content: {"role": "user", "content": content}, parts())
answered = st.builds(lambda content: {"role": "tool", "content": content}, parts())
systems = st.builds(lambda content: {"role": "system", "content": content}, texts)


heads = st.lists(systems, max_size=1)
turns = asked | assistants() | answered
bodies = {least: st.lists(turns, min_size=least, max_size=6) for least in (0, 1)}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    head = draw(heads)
    return head + draw(bodies[not head])


toolboxes = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": words, "description": texts}),
        }
    ),
    max_size=2,
)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def placed(messages: list[dict[str, Any]], checkpoint: Any) -> list[dict[str, Any]]:
    """Return the messages in the checkpoint's form, with urls in place of image numbers."""
    messages = checkpoint.case.fit(messages)

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] == "text":
            return given
        return {"type": "image_url", "image_url": {"url": checkpoint.refs[given["image_url"]].url}}

    return [
        {**m, "content": [part(p) for p in m["content"]]} if isinstance(m["content"], list) else m
        for m in messages
    ]


def offered(tools: list[dict[str, Any]], checkpoint: Any) -> list[dict[str, Any]]:
    return tools if checkpoint.case.takes_tools else []


def said_ids(checkpoint: Any, content: list[int]) -> list[int]:
    """Return a completion with this content, after reasoning if the format has any, and before the
    next message.
    """
    reasoning = checkpoint.case.sampled_reasoning
    talk = [user("hi"), assistant("Q", reasoning=reasoning), follow_up(checkpoint)]
    rendered = checkpoint.renderer.render(talk)
    own = rendered.trained[0]
    ids = rendered.token_ids[own.start : own.stop]
    at = next(i for i, token in enumerate(ids) if checkpoint.renderer.decode([token]) == "Q")
    return ids[:at] + content + ids[at + 1 :]


def follow_up(checkpoint: Any) -> Any:
    """A message that can follow without rewriting history."""
    if checkpoint.case.takes_reasoning:
        return {"role": "tool", "content": "go on"}
    return user("go on")


# -- tokens


@many
@given(messages=conversations(), tools=toolboxes, prompt=st.booleans())
@example(messages=[{"role": "user", "content": SIDE_BY_SIDE}], tools=[], prompt=True)
def test_tokens_match_the_checkpoints_template(
    checkpoint: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool
) -> None:
    messages, tools = placed(messages, checkpoint), offered(tools, checkpoint)
    rendered = checkpoint.renderer.render(messages, tools, generation_prompt=prompt)
    assert rendered.token_ids == checkpoint.template_ids(messages, tools, prompt)


@many
@given(messages=conversations(), tools=toolboxes, prompt=st.booleans())
def test_tokens_match_the_published_template(
    templated: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool
) -> None:
    published = templated.case.published_template
    if not published.is_file():
        pytest.skip("there is no folder `shared` beside the checkout")
    messages, tools = placed(messages, templated), offered(tools, templated)
    rendered = templated.renderer.render(messages, tools, generation_prompt=prompt)
    want = templated.template_ids(messages, tools, prompt, published.read_text())
    assert rendered.token_ids == want


def test_tokens_match_the_recorded_ids(checkpoint: Any) -> None:
    golden = json.loads(checkpoint.case.golden.read_text())[checkpoint.case.name]
    assert golden
    for entry in golden:
        messages = placed(entry["messages"], checkpoint)
        assert checkpoint.renderer.render(messages).token_ids == entry["token_ids"]


@some
@given(messages=conversations(), tools=toolboxes)
def test_spans_tile_the_tokens(
    checkpoint: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    messages, tools = placed(messages, checkpoint), offered(tools, checkpoint)
    rendered = checkpoint.renderer.render(messages, tools, generation_prompt=False)
    assert len(rendered.spans) == len(messages)
    edges = [0, *(span.stop for span in rendered.spans)]
    assert edges[:-1] == [span.start for span in rendered.spans]
    assert edges[-1] == len(rendered.token_ids)
    prompted = checkpoint.renderer.render(messages, tools)
    assert prompted.spans == rendered.spans
    # An answer may end with the token that opens the next turn, here of another role.
    same = edges[-1] - bool(checkpoint.case.openers and messages[-1]["role"] == "assistant")
    assert prompted.token_ids[:same] == rendered.token_ids[:same]


@some
@given(messages=conversations())
def test_slots_cover_exactly_the_pads(checkpoint: Any, messages: list[dict[str, Any]]) -> None:
    rendered = checkpoint.renderer.render(placed(messages, checkpoint))
    check_slots(rendered.slots, len(rendered.token_ids))
    pads = checkpoint.renderer.pad_token_ids[:1]
    offsets = checkpoint.family.feature_offsets
    covered = [s.offset + i for s in rendered.slots for i in offsets(s.item).tolist()]
    assert covered == [i for i, token in enumerate(rendered.token_ids) if token in pads]
    for slot in rendered.slots:
        checkpoint.family.check_item(slot.item)
        assert slot.length == checkpoint.family.num_tokens(slot.item)


@some
@given(messages=conversations())
def test_trained_tokens_decode_to_the_assistants_text(
    checkpoint: Any, messages: list[dict[str, Any]]
) -> None:
    messages = placed(messages, checkpoint)
    rendered = checkpoint.renderer.render(messages)
    answers = [m for m in messages if m["role"] == "assistant"]
    assert len(rendered.trained) == len(answers)
    for span, message in zip(rendered.trained, answers, strict=True):
        ids = rendered.token_ids[span.start : span.stop]
        assert ids and ids[-1] in checkpoint.renderer.stop_token_ids
        content = nfc(message["content"])
        # White space that merged with the header belongs to the header.
        assert content.strip() in nfc(checkpoint.renderer.decode(ids))


def test_image_slot_belongs_to_its_message(seeing: Any) -> None:
    first, second = seeing.refs[:2]
    rendered = seeing.renderer.render([user("a", first), assistant("b"), user(second, "c")])
    assert [slot.item.ref for slot in rendered.slots] == [first, second]
    for slot, span in zip(rendered.slots, (rendered.spans[0], rendered.spans[2]), strict=True):
        assert span.start < slot.offset
        assert slot.end < span.stop


def test_dicts_and_structs_render_identically(seeing: Any) -> None:
    ref = seeing.refs[0]
    dicts = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what"},
                {"type": "text", "text": " is this"},
                {"type": "image_url", "image_url": {"url": ref.url}},
            ],
        },
    ]
    parts = (TextPart("what"), TextPart(" is this"), ImagePart(ref))
    structs = [system("be brief"), Message(role="user", content=parts)]
    assert seeing.renderer.render(dicts) == seeing.renderer.render(structs)


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
FORMS_OF_A_CALL = {
    "name_and_arguments": {"name": "look", "arguments": {"x": 1, "at": "é"}},
    "openai": {
        "type": "function",
        "function": {"name": "look", "arguments": '{"x": 1, "at": "é"}'},
    },
    "struct": ToolCall("look", '{"x": 1, "at": "é"}'),
}


@pytest.mark.parametrize("form", FORMS_OF_A_CALL)
@pytest.mark.parametrize("content", ["", "I look."])
def test_assistant_with_tool_calls_renders_like_the_template(
    checkpoint: Any, form: str, content: str
) -> None:
    call = FORMS_OF_A_CALL[form]
    talk = [
        user("go"),
        assistant(content, tool_calls=[call, call]),
        Message("tool", text("a tree")),
    ]
    if not checkpoint.case.takes_tools:
        with pytest.raises(MessageError, match=r"^messages\[1\]"):
            checkpoint.renderer.render(talk)
        return
    calls = [{"type": "function", "function": FORMS_OF_A_CALL["name_and_arguments"]}] * 2
    dicts = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "a tree"},
    ]
    rendered = checkpoint.renderer.render(talk, [LOOK])
    assert rendered.token_ids == checkpoint.template_ids(dicts, [LOOK])
    (said,) = rendered.trained
    parsed = checkpoint.renderer.parse(rendered.token_ids[said.start : said.stop], [LOOK])
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [
        ("look", {"x": 1, "at": "é"})
    ] * 2


# -- bridge


@bridged
@given(
    before=conversations(),
    said=assistants(),
    new=st.lists(asked | answered, min_size=1, max_size=3),
    tools=toolboxes,
)
def test_bridge_matches_rendering_the_whole_conversation(
    checkpoint: Any,
    before: list[dict[str, Any]],
    said: dict[str, Any],
    new: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> None:
    before, tools = placed(before, checkpoint), offered(tools, checkpoint)
    said, *new = placed([asking, said, *new], checkpoint)[1:]
    new = new or [asking]
    assume(not checkpoint.case.alternates or before[-1]["role"] == "user")
    renderer = checkpoint.renderer
    prompt = renderer.render(before, tools).token_ids
    last = renderer.render([*before, said], tools, generation_prompt=False)
    own = last.trained[-1]
    # Content that begins with a newline can merge with the header, which a sampler cannot do.
    assume(last.token_ids[: own.start] == prompt)
    completion = last.token_ids[own.start : own.stop]
    whole = renderer.render([*before, said, *new], tools)

    bridged = renderer.bridge(prompt, completion, new, tools)
    if whole.token_ids[: own.stop] != prompt + completion:
        assert bridged == Refused("history_rewritten")
        return
    assert isinstance(bridged, Bridged)
    assert prompt + completion + bridged.token_ids == whole.token_ids
    assert bridged.slots == [slot for slot in whole.slots if slot.offset >= own.stop]
    assert bridged.spans[0].start == own.stop
    assert [span.stop for span in bridged.spans] == [s.stop for s in whole.spans[-len(new) :]]

    cut = renderer.bridge(prompt, completion[:-1], new, tools)
    assert isinstance(cut, Bridged)
    assert prompt + completion[:-1] + cut.token_ids == whole.token_ids
    assert cut.spans[0].start == own.stop - 1


def test_bridge_keeps_non_canonical_tokens(checkpoint: Any) -> None:
    renderer, new = checkpoint.renderer, follow_up(checkpoint)
    prompt = renderer.render([user("hi")]).token_ids
    # The ids spell "user" letter by letter. Rendering the message again would merge them.
    letters = [said_ids(checkpoint, renderer.render([user(c)]).token_ids) for c in "user"]
    spelled = [
        next(t for t in ids if renderer.decode([t]) == c)
        for ids, c in zip(letters, "user", strict=True)
    ]
    completion = said_ids(checkpoint, spelled)
    assert renderer.parse(completion).text == "user"
    bridged = renderer.bridge(prompt, completion, [new])
    assert isinstance(bridged, Bridged)
    text = renderer.decode(prompt + completion + bridged.token_ids)
    reasoning = checkpoint.case.sampled_reasoning
    whole = renderer.render([user("hi"), assistant("user", reasoning=reasoning), new])
    assert text == renderer.decode(whole.token_ids)


def test_bridge_closes_a_turn_ended_by_the_other_stop_token(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    prompt = renderer.render([user("hi")]).token_ids
    *said, close = said_ids(checkpoint, [])
    opening = {token for _, token in checkpoint.case.openers}
    for stop in set(renderer.stop_token_ids) - {close}:
        bridged = renderer.bridge(prompt, [*said, stop], [follow_up(checkpoint)])
        if renderer.decode([stop]) in opening:  # it opened the turn of another role
            assert bridged == Refused("history_rewritten")
            continue
        assert isinstance(bridged, Bridged)
        assert bridged.token_ids[0] == close


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ([], "no_new_messages"),
        ([assistant("me")], "assistant_among_new"),
        ([user("a"), {"role": "assistant", "content": "me"}], "assistant_among_new"),
        ([{"role": "wizard", "content": "x"}], "unknown_role"),
        ([system("late")], "system_among_new"),
    ],
)
def test_bridge_refuses_ambiguous_histories(checkpoint: Any, new: Any, reason: str) -> None:
    renderer = checkpoint.renderer
    prompt = renderer.render([user("hi")]).token_ids
    assert renderer.bridge(prompt, [renderer.stop_token_ids[0]], new) == Refused(reason)


def test_bridge_refuses_a_history_other_than_one_turn(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    stop = renderer.stop_token_ids[0]
    prompt = renderer.render([user("hi")]).token_ids
    closed = renderer.render([user("hi")], generation_prompt=False).token_ids
    new = [user("go on")]
    assert renderer.bridge(prompt, [stop, stop], new) == Refused("stop_inside_completion")
    for pad in renderer.pad_token_ids:
        assert renderer.bridge(prompt, [pad, stop], new) == Refused("media_in_completion")
    if closed != prompt:  # some formats open an answer by the end of the question
        assert renderer.bridge(closed, [stop], new) == Refused("prompt_without_header")


# -- parse


@bridged
@given(said=assistants())
@example(said={"role": "assistant", "content": "it is red \n"})
def test_parse_inverts_render(checkpoint: Any, said: dict[str, Any]) -> None:
    assume(not said["content"][:1].isspace())
    case, renderer = checkpoint.case, checkpoint.renderer
    said = placed([asking, said], checkpoint)[1]
    rendered = renderer.render([user("hi"), said], generation_prompt=False)
    own = rendered.trained[0]
    parsed = renderer.parse(rendered.token_ids[own.start : own.stop])
    assert parsed.stopped
    assert parsed.malformed_calls == ()
    # Some tokenizers normalize.
    assert nfc(parsed.text) == nfc(case.carried(said["content"]))
    assert nfc(parsed.reasoning or "") == nfc(case.thought(said.get("reasoning_content", "")))
    calls = [call["function"] for call in said.get("tool_calls", [])]
    assert [call.name for call in parsed.tool_calls] == [call["name"] for call in calls]
    for call, want in zip(parsed.tool_calls, calls, strict=True):
        call_arguments, arguments = (
            nfc(call.arguments),
            nfc(json.dumps(want["arguments"], ensure_ascii=False)),
        )
        if case.types_arguments:
            assert call_arguments == arguments
        else:
            assert spelled(json.loads(call_arguments)) == spelled(json.loads(arguments))


def spelled(arguments: dict[str, Any]) -> dict[str, str]:
    """Arguments as a format that does not carry their types writes them."""
    return {
        name: json.dumps(value, ensure_ascii=False)
        if isinstance(value, (dict, list))
        else str(value)
        for name, value in arguments.items()
    }


def test_parse_reports_whether_the_model_stopped(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    ids = said_ids(checkpoint, renderer.render([user("x")]).token_ids[3:4])[:-1]
    assert not renderer.parse([]).stopped
    assert not renderer.parse(ids).stopped
    for stop in renderer.stop_token_ids:
        message = renderer.parse([*ids, stop, *ids])
        assert message.stopped
        assert message.text == renderer.parse(ids).text


def test_parse_ignores_text_that_spells_a_stop_token(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    spelled = renderer.decode([renderer.stop_token_ids[0]])
    rendered = renderer.render([user("hi"), assistant(f"a{spelled}b")], generation_prompt=False)
    own = rendered.trained[0]
    assert renderer.parse(rendered.token_ids[own.start : own.stop]).text == f"a{spelled}b"


def test_rendering_does_not_modify_the_callers_messages_and_ids(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    messages = placed(
        [asking, {"role": "user", "content": [{"type": "text", "text": "a"}]}], checkpoint
    )
    before = json.dumps(messages)
    prompt = renderer.render(messages).token_ids
    completion = said_ids(checkpoint, [])
    copies = (list(prompt), list(completion))
    new = [follow_up(checkpoint)]
    renderer.bridge(prompt, completion, new)
    renderer.parse(completion)
    assert json.dumps(messages) == before
    assert (prompt, completion) == copies
    assert new == [follow_up(checkpoint)]


# -- loading


def test_banned_and_stop_ids_are_in_the_vocabulary(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    ids = renderer.pad_token_ids + renderer.stop_token_ids
    assert len(set(ids)) == len(ids)
    assert all(0 <= token < renderer.vocab_size for token in ids)
    # Pad tokens can never be sampled.
    assert set(checkpoint.family.slot_token_ids) <= set(renderer.pad_token_ids)


def test_rendering_loads_neither_torch_nor_transformers(checkpoint: Any, tmp_path: Path) -> None:
    program = """
import sys
from sightline import MediaStore, load_renderer
from sightline.message import user
model, root, url = sys.argv[1:]
renderer = load_renderer(model, MediaStore(root))
content = [{"type": "image_url", "image_url": {"url": url}}] if url else "hi"
rendered = renderer.render([{"role": "user", "content": content}])
assert bool(rendered.slots) == bool(url)
renderer.bridge(rendered.token_ids, [renderer.stop_token_ids[0]], [user("go on")])
renderer.parse(rendered.token_ids)
heavy = {"torch", "transformers", "torchvision"} & set(sys.modules)
assert not heavy, heavy
"""
    url = checkpoint.refs[0].url if checkpoint.case.shows_media else ""
    arguments = [str(checkpoint.path), str(checkpoint.store.root), url]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, cwd=tmp_path)
