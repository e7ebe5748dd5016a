"""Videos in messages of environments and agents."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from PIL import Image
from videos import encode_video, noise_frames

from sightline import MediaRef, MediaStore
from sightline.errors import MessageError
from sightline.media import ImageIngestor
from sightline.message import (
    ImagePart,
    Message,
    TextPart,
    VideoPart,
    put_images,
    to_message,
    to_messages,
    user,
    video,
)
from sightline.message.parts import VideoFrame
from sightline.message.read import to_openai_part


@pytest.fixture
def clip() -> bytes:
    return encode_video(noise_frames(4, 32, 32))


@pytest.fixture
def film(store: MediaStore, clip: bytes) -> MediaRef:
    return store.put(clip)


@pytest.fixture
def image(store: MediaStore) -> MediaRef:
    return store.put(Image.new("RGB", (32, 32), (1, 2, 3)))


def test_every_spelling_of_a_video_becomes_one_form(
    store: MediaStore, film: MediaRef, clip: bytes
) -> None:
    resolver = ImageIngestor(store)
    data = film.data_url(clip)
    base64 = data.partition(",")[2]
    for part in (
        film,
        VideoPart(ref=film),
        {"type": "video_url", "video_url": {"url": data}},
        {"type": "video_url", "video_url": film.url},
        {"type": "video", "video": film.url},
        {"type": "video", "ref": film},
        {"type": "input_video", "video_url": data},
        {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": base64}},
    ):
        message = {"role": "user", "content": ["a", part, "b"]}
        read = to_message(message, resolver, "messages[0]")
        assert read.content == (TextPart("a"), VideoPart(ref=film), TextPart("b")), part
        assert read.refs == (film,) and read.images == () and read.text == "ab"


def test_images_with_times_are_a_video(store: MediaStore, image: MediaRef) -> None:
    resolver = ImageIngestor(store)
    part = {"type": "video", "frames": [{"image_url": image.url, "seconds": 0}]}
    part["frames"].append({"image_url": {"url": image.url}, "seconds": 0.5})
    wanted = VideoPart(frames=(VideoFrame(image, 0.0), VideoFrame(image, 0.5)))
    message = {"role": "user", "content": [part]}
    assert to_message(message, resolver, "m").content == (wanted,)
    again = to_openai_part(wanted, lambda ref: ref.url)
    assert to_message({"role": "user", "content": [again]}, resolver, "m").content == (wanted,)
    packed = msgspec.msgpack.encode(Message("user", (wanted,)))
    assert msgspec.msgpack.decode(packed, type=Message).content == (wanted,)


def test_videos_passed_by_environments_are_stored_when_sent(
    store: MediaStore, clip: bytes, film: MediaRef, tmp_path: Path
) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip)
    picture = Image.new("RGB", (8, 8))
    frames = [(picture, 0.0), (store.put(picture), 1.0)]
    sent = [user("a", tmp_path / "clip.mp4", video(clip), video(film), film, video(frames))]
    pool_like = put_images(sent, store.put)
    (message,) = to_messages(pool_like, ImageIngestor(store))
    file, listed = VideoPart(ref=film), message.content[-1]
    assert message.content[1:-1] == (file, file, file, file)
    assert isinstance(listed, VideoPart) and len(set(listed.refs)) == 1
    assert message.videos == message.content[1:]


@pytest.mark.parametrize(
    "times", [(0.0, 0.0), (1.0, 0.5), (-1.0, 2.0), (0.0, float("inf")), (float("nan"), 1.0)]
)
def test_frame_times_must_increase(image: MediaRef, times: tuple[float, float]) -> None:
    with pytest.raises(MessageError, match="increasing"):
        video([(image, time) for time in times])


def test_invalid_video_is_refused_by_its_path(
    store: MediaStore, image: MediaRef, film: MediaRef
) -> None:
    for part, where in (
        ({"type": "video_url", "video_url": image.url}, r"\.ref: expected a video, got an image"),
        ({"type": "image_url", "image_url": film.url}, r"\.ref: expected an image, got a video"),
        (ImagePart(film), r"\.ref: expected an image, got a video"),
        (VideoPart(ref=image), r"\.ref: expected a video, got an image"),
        ({"type": "video"}, r"\.video_url: no URL of the video"),
        ({"type": "video", "frames": []}, r"\.frames: a video needs"),
        ({"type": "video", "frames": "x"}, r"\.frames: its type is str"),
        ({"type": "video", "frames": [3]}, r"\.frames\[0\]: its type is int"),
        (
            {"type": "video", "frames": [{"image": image.url}]},
            r"\.frames\[0\]\.seconds: it is missing",
        ),
        ({"type": "video", "frames": [{"seconds": 0}]}, r"\.frames\[0\]\.image_url: no URL"),
        (
            {"type": "video", "frames": [{"image": film.url, "seconds": 0}]},
            r"\.frames\[0\]\.ref: expected an image, got a video",
        ),
        (
            {"type": "video", "frames": [{"image": image.url, "seconds": 1}] * 2},
            r"\.frames: the times of frames",
        ),
    ):
        with pytest.raises(MessageError, match=rf"^messages\[0\]\.content\[1\]{where}"):
            to_messages([{"role": "user", "content": ["a", part]}], ImageIngestor(store))
    for wrong in (3, "clip.mp4", [image], [(image, "soon")]):
        with pytest.raises(MessageError):
            video(wrong)  # type: ignore[arg-type]


def test_message_without_videos_keeps_its_digest() -> None:
    ref = MediaRef("0" * 64, "image/png", 2, 3, 4)
    message = Message("user", (TextPart("a"), ImagePart(ref)))
    assert message.digest == "92f209a731c35f7e374897c04e1ff920"
