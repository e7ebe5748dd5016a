"""Parts of messages: three forms of an image become one, and the type decides.

The server, chat.send and training data refuse unknown parts by their path.
"""

from __future__ import annotations

import base64
from typing import Any

import pytest
from PIL import Image

from sightline.errors import MessageError
from sightline.media import ImageIngestor, MediaRef, MediaStore
from sightline.message import ImagePart, TextPart, assistant, to_message, to_messages

UNKNOWN_KINDS: list[Any] = [
    "file", "input_file", "movie", "input_audio",
    "document", "refusal", "tool_result", "IMAGE_URL", "", None, 3, ["image_url"], {"a": 1},
]  # fmt: skip


@pytest.fixture
def ref(store: MediaStore) -> MediaRef:
    return store.put(Image.new("RGB", (32, 32), (1, 2, 3)))


@pytest.fixture
def url(store: MediaStore, ref: MediaRef) -> str:
    return "data:image/png;base64," + base64.b64encode(store.get(ref)).decode()


def spellings(url: str, ref: MediaRef) -> list[Any]:
    data = url.partition(",")[2]
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": ref.url}},
        {"type": "input_image", "image_url": url},
        {"type": "input_image", "image_url": {"url": url}, "detail": "auto"},
        {"type": "image", "image_url": {"url": url}},
        {"type": "image", "image": url},
        {"type": "image", "image": {"url": url}},
        {"type": "image", "url": url},
        {"type": "image", "image": ref},
        {"type": "image", "ref": ref},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "image", "data": data, "mimeType": "image/png"},
        # Some programs write every key of every kind of part.
        {"type": "image_url", "image_url": {"url": url}, "text": None},
        {"type": "image", "image_url": None, "image": url, "text": "not this"},
        ref,
        ImagePart(ref),
    ]


def test_every_spelling_of_an_image_becomes_one_form(
    store: MediaStore, url: str, ref: MediaRef
) -> None:
    resolver = ImageIngestor(store)
    for part in spellings(url, ref):
        message = {"role": "user", "content": ["a", part, "b"]}
        read = to_message(message, resolver, "messages[0]")
        assert read.content == (TextPart("a"), ImagePart(ref), TextPart("b")), part


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a", "image_url": None},
        {"type": "text", "text": "a", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "text", "text": "a", "image": "x", "video": "y"},
        {"type": "input_text", "text": "a"},
    ],
)
def test_text_part_with_extra_fields_is_text(store: MediaStore, part: dict[str, Any]) -> None:
    read = to_message({"role": "user", "content": [part]}, ImageIngestor(store), "messages[0]")
    assert read.content == (TextPart("a"),)


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["missing", "null"])
def test_only_an_assistant_message_may_lack_content(
    store: MediaStore, role: str, content: dict[str, Any]
) -> None:
    with pytest.raises(MessageError, match=r"^messages\[0\]\.content: it is missing or null"):
        to_messages([{"role": role, **content}], ImageIngestor(store))
    (empty,) = to_messages([{"role": role, "content": ""}], ImageIngestor(store))
    (answer,) = to_messages([{"role": "assistant", **content}], ImageIngestor(store))
    assert empty.content == answer.content == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}], ids=str)
def test_call_with_arguments_that_are_not_json_is_refused(value: Any) -> None:
    with pytest.raises(MessageError, match=r"^assistant\(\)\[0\]\.arguments: this is not JSON"):
        assistant(tool_calls=[{"name": "click", "arguments": {"x": value}}])


@pytest.mark.parametrize("kind", UNKNOWN_KINDS, ids=str)
def test_unknown_part_type_is_refused_by_its_path(store: MediaStore, url: str, kind: Any) -> None:
    part = {"type": kind, "text": "a", "image_url": {"url": url}}
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": ["a", part]}]
    with pytest.raises(MessageError, match=r"^messages\[1\]\.content\[1\]\.type: ") as caught:
        to_messages(messages, ImageIngestor(store))
    assert "image_url" in caught.value.fix
    assert store.count() == 1, "nothing but the fixture's image was put"


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"type": "image"}, ".image_url"),
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": None}, ".image_url"),
        ({"type": "image_url", "image_url": ""}, ".image_url"),
        ({"type": "image_url", "image_url": 3}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": None}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": ["x"]}}, ".image_url.url"),
        ({"type": "image", "image": b"bytes"}, ".image"),
        ({"type": "image", "image": Image.new("L", (4, 4))}, ".image"),
        ({"type": "image", "source": {"type": "base64", "data": ""}}, ".source.data"),
        ({"type": "input_image", "file_id": "file-1"}, ".image_url"),
    ],
)
def test_image_part_without_a_url_is_refused_at_the_urls_path(
    store: MediaStore, part: Any, where: str
) -> None:
    with pytest.raises(MessageError) as caught:
        to_messages([{"role": "user", "content": [part]}], ImageIngestor(store))
    assert str(caught.value).startswith(f"messages[0].content[0]{where}: ")
