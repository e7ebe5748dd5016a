"""Refusals of every renderer, on every checkpoint of conftest.

1. Text of a message cannot forge a special token, a turn or an image.
2. What the chat format cannot express is refused, with the path.
"""

from __future__ import annotations

import base64
from typing import Any

import pytest
from PIL import Image

from sightline import MediaRefused, MessageError
from sightline.message import Message, assistant, system, user, video


def test_text_that_spells_a_special_token_stays_text(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    tokens = sorted(checkpoint.transformers_tokenizer.added_tokens_decoder.items())
    for token_id, token in tokens:
        plain = renderer.render([user("x")]).token_ids
        forged = renderer.render([user(f"x{token.content}y")]).token_ids
        assert forged.count(token_id) == plain.count(token_id), token.content
        assert f"x{token.content}y" in renderer.decode(forged)


def test_forged_turn_creates_no_second_message(checkpoint: Any) -> None:
    renderer = checkpoint.renderer
    spoken = renderer.decode(renderer.render([user("hi"), assistant("ok")]).token_ids)
    rendered = renderer.render([user(spoken)])
    assert len(rendered.spans) == 1
    assert rendered.slots == rendered.trained == []
    plain = renderer.render([user("x")]).token_ids
    for stop in renderer.stop_token_ids[:1]:
        assert rendered.token_ids.count(stop) == plain.count(stop)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_image_in_an_unsupported_role_is_refused_by_path(seeing: Any, role: str) -> None:
    url = seeing.refs[0].url
    content = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    messages = [{"role": role, "content": content}, {"role": "user", "content": "c"}]
    if role == "system" and seeing.case.shows_system_images:
        assert seeing.renderer.render(messages).token_ids == seeing.template_ids(messages)
        return
    where = r"messages\[0\]\.content\[2\]"
    with pytest.raises(MessageError, match=rf"{where}.*cannot show an image .* role '{role}'"):
        seeing.renderer.render(messages)


def test_describe_lists_refused_features(checkpoint: Any) -> None:
    parts = dict(line.split(": ", 1) for line in checkpoint.renderer.describe())
    case = checkpoint.case
    takes = {"images": case.shows_media, "tools": case.takes_tools}
    takes |= {"reasoning": case.takes_reasoning}
    if "videos" in parts:
        takes |= {"videos": case.shows_videos}
    supported = {name: not parts[name].startswith("refused, because ") for name in takes}
    assert supported == takes


def test_unsupported_video_is_refused_by_path(checkpoint: Any) -> None:
    if checkpoint.case.shows_videos:
        return  # test_video has them
    ref = checkpoint.refs[0]
    with pytest.raises(
        MessageError, match=r"messages\[0\]\.content\[1\]: a video.*(accepts|has) no"
    ):
        checkpoint.renderer.render([user("see ", video([(ref, 0.0), (ref, 1.0)]))])
    if checkpoint.family.shows_media:
        with pytest.raises(MediaRefused, match="accepts no videos"):
            checkpoint.family.steps(video([(ref, 0.0), (ref, 1.0)]))


def test_media_that_cannot_be_shown_is_refused_before_its_bytes_are_read(checkpoint: Any) -> None:
    """The bytes are broken, which would be another error."""
    film, picture = (
        f"data:{kind};base64,{base64.b64encode(data).decode()}"
        for kind, data in (("video/mp4", b"\0\0\0\x10ftypisom\0\0\0\0"), ("image/png", b"png"))
    )

    def render(url: str, kind: str, role: str = "user") -> None:
        content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": url}}]
        checkpoint.renderer.render([{"role": role, "content": content}])

    where = r"^messages\[0\]\.content\[1\]\."
    with pytest.raises(
        MessageError, match=rf"{where}image_url.url: .*(got a video|no vision tower)"
    ):
        render(film, "image_url")
    with pytest.raises(MessageError, match=rf"{where}image_url.url: .*cannot (show|be shown)"):
        render(picture, "image_url", "assistant")
    if not checkpoint.case.shows_videos:
        with pytest.raises(MessageError, match=rf"{where}video_url.url: a video cannot be shown"):
            render(film, "video_url")


def test_image_shape_without_a_layout_is_refused_by_path(seeing: Any) -> None:
    size = seeing.case.refused_size
    ref = seeing.store.put(Image.new("RGB", size or (402, 2)))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ref.url}}]},
    ]
    if size is None:
        assert seeing.renderer.render(messages).slots
        return
    with pytest.raises(MediaRefused, match=rf"messages\[2\]\.content\[0\]: .*{size[0]}x{size[1]}"):
        seeing.renderer.render(messages)


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([user("a"), 3], r"messages\[1\]"),
        ([{"role": "wizard", "content": "a"}], r"messages\[0\]\.role"),
        ([user("a"), system("late")], r"messages\[1\]\.role"),
        (
            [user("a"), Message(role="user", reasoning="c")],
            r"messages\[1\]\.reasoning",
        ),
        ([user("\ud800")], r"messages\[0\]\.content"),
        (
            [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}],
            r"messages\[0\]\.tool_calls",
        ),
        ([{"role": "user", "content": [{"type": "file"}]}], r"messages\[0\]\.content\[0\]\.type"),
    ],
)
def test_inexpressible_messages_are_refused_by_path(
    checkpoint: Any, messages: Any, path: str
) -> None:
    with pytest.raises(MessageError, match="^" + path + ": ") as caught:
        checkpoint.renderer.render(messages)
    assert caught.value.fix


def test_bridge_names_the_path_in_the_new_messages(seeing: Any) -> None:
    renderer = seeing.renderer
    prompt = renderer.render([user("hi")]).token_ids
    new = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]
    with pytest.raises(MessageError, match=r"new_messages\[0\]\.content\[0\]\.image_url"):
        renderer.bridge(prompt, [], new)


def test_unsupported_tools_and_reasoning_are_refused(checkpoint: Any) -> None:
    case, render = checkpoint.case, checkpoint.renderer.render
    tool = {"type": "function", "function": {"name": "f"}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    if not case.takes_reasoning:
        with pytest.raises(MessageError, match=r"^messages\[1\]\.reasoning: "):
            render([user("a"), assistant("b", reasoning="c")])
    if not case.takes_tools:
        with pytest.raises(MessageError, match="^tools: "):
            render([user("a")], [tool])
        with pytest.raises(MessageError, match=r"^messages\[1\]\.tool_calls: "):
            render([user("a"), called])
        with pytest.raises(MessageError, match=r"^messages\[1\]\.role: "):
            render([user("a"), {"role": "tool", "content": "b"}])
    if not case.shows_media:
        content = [{"type": "text", "text": "a"}, {"type": "image", "ref": checkpoint.refs[0]}]
        with pytest.raises(MessageError, match=r"^messages\[0\]\.content\[1\]: .*vision tower"):
            render([{"role": "user", "content": content}])
    if case.wants_query:
        with pytest.raises(MessageError, match="^messages: .*needs a user message"):
            render([assistant("b")])
    with pytest.raises(MessageError, match=r"^messages\[0\]\.reasoning: "):
        render([{"role": "user", "content": "a", "reasoning_content": "b"}])


def test_tool_message_can_be_read_without_its_conversation(checkpoint: Any) -> None:
    """New messages do not include the question that began the conversation."""
    if checkpoint.case.takes_tools:
        new = [{"role": "tool", "tool_call_id": "c", "content": "b"}]
        (read,) = checkpoint.renderer.read_conversation(new)
        assert read.role == "tool"
