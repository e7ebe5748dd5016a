from __future__ import annotations

from hashlib import sha256

import msgspec
import pytest

from sightline.errors import MediaError
from sightline.media import MediaRef

DIGEST = sha256(b"bytes").hexdigest()


def make(**changes: object) -> MediaRef:
    fields = {"digest": DIGEST, "mime": "image/png", "width": 4, "height": 3, "nbytes": 5}
    return MediaRef(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": DIGEST.upper()},
        {"digest": DIGEST[:-1]},
        {"digest": DIGEST + "\n"},
        {"digest": "../" + DIGEST[3:]},
        {"digest": 5},
        {"mime": "image/bmp"},
        {"width": 0},
        {"height": -3},
        {"height": True},
        {"width": 4.0},
        {"nbytes": 0},
        {"num_frames": 5},
        {"fps": 1.0},
        {"mime": "video/mp4"},
        {"mime": "video/mp4", "num_frames": 5},
        {"mime": "video/mp4", "fps": 1.0},
        {"mime": "video/mp4", "num_frames": 5, "fps": float("nan")},
        {"mime": "video/mp4", "num_frames": 5, "fps": 1e-9},
    ],
)
def test_invalid_ref_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(MediaError) as caught:
        make(**changes)
    assert caught.value.fix


def test_bad_ref_is_refused_at_decoding_with_its_path() -> None:
    data = msgspec.json.encode([msgspec.to_builtins(make()) | {"width": 0}])
    with pytest.raises(msgspec.ValidationError, match=r"\$\[0\]"):
        msgspec.json.decode(data, type=list[MediaRef])


def test_an_unknown_field_such_as_pixels_is_refused() -> None:
    data = msgspec.json.encode(msgspec.to_builtins(make()) | {"pixel_values": [1]})
    with pytest.raises(msgspec.ValidationError, match="pixel_values"):
        msgspec.json.decode(data, type=MediaRef)


def test_the_digest_is_plain_text_inside_msgpack() -> None:
    assert DIGEST.encode() in msgspec.msgpack.encode(make())
