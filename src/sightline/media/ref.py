"""`MediaRef`, the small, location-independent name of an image or video."""

from __future__ import annotations

import base64
import re
from hashlib import sha256

import msgspec

from sightline.errors import MediaCorrupt, MediaError

IMAGE_MIMES = ("image/png", "image/jpeg", "image/webp", "image/gif")
VIDEO_MIMES = ("video/mp4", "video/webm")
MIMES = IMAGE_MIMES + VIDEO_MIMES
MIN_FPS, MAX_FPS = 0.001, 1000.0
"""Limits on a video's frames per second."""
URL_PREFIX = "media:sha256:"

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class MediaRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The name of one image or video: the SHA-256 of its bytes, and the fields for layout."""

    digest: str
    """64 lowercase hex characters."""
    mime: str
    """The type of the bytes, detected from them: one of `MIMES`."""
    width: int
    height: int
    """Size in pixels after EXIF orientation, which determines the token grid."""
    nbytes: int
    num_frames: int = 0
    """Frames of a video that decode; 0 for an image."""
    fps: float = 0.0
    """Average frames per second of a video; 0 for an image."""

    def __post_init__(self) -> None:  # msgspec runs this on decode as well
        check_digest(self.digest)
        frames = (self.num_frames,) if self.is_video else ()
        sizes = (self.width, self.height, self.nbytes, *frames)
        is_whole = all(type(size) is int and size > 0 for size in sizes)
        has_rate = MIN_FPS <= self.fps <= MAX_FPS if self.is_video else self.fps == 0
        is_still = self.is_video or self.num_frames == 0
        if self.mime not in MIMES or not (is_whole and has_rate and is_still):
            raise MediaError(
                f"not a media ref: {msgspec.structs.asdict(self)}",
                "use refs from MediaStore.put or get_ref. They have a mime of "
                f"{', '.join(MIMES)}, a positive width, height and nbytes, and, for a video only, "
                "num_frames and fps",
            )

    def __repr__(self) -> str:
        kind = self.mime.partition("/")[2]
        frames = f", {self.num_frames} frames" if self.is_video else ""
        return f"MediaRef({self.digest[:12]}, {kind}, {self.width}x{self.height}{frames})"

    @property
    def is_video(self) -> bool:
        return self.mime in VIDEO_MIMES

    @property
    def url(self) -> str:
        """The ref as a url in a message."""
        return URL_PREFIX + self.digest

    def data_url(self, data: bytes) -> str:
        """Return the bytes as a data url, for a server that cannot read the store."""
        return f"data:{self.mime};base64,{base64.b64encode(data).decode()}"


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def check_digest(text: object) -> None:
    if not is_digest(text):
        raise MediaError(
            f"not a media digest: {str(text)[:80]!r}",
            "a digest is the SHA-256 of an image's bytes as 64 lowercase hex characters",
        )


def verify_bytes(digest: str, data: bytes) -> bytes:
    """Return `data` if it hashes to `digest`. Raise `MediaCorrupt` if not."""
    if (actual := sha256(data).hexdigest()) == digest:
        return data
    raise MediaCorrupt(
        f"image {digest[:12]} holds {len(data)} bytes that hash to {actual[:12]}",
        "put the image again to replace the damaged file; `sightline media verify` lists all "
        "damaged files of a store",
    )
