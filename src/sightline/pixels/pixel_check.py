"""Check how another interpreter processes images: `python -m sightline.pixels.pixel_check`.

Interpreters with different decoders produce different pixels. The launcher sends a request as JSON
and reads the result as one line of JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from sightline.errors import Misaligned, SightlineError
from sightline.families import load_family, load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import user
from sightline.pixels.materialize import Materializer


class PixelCheckRequest(msgspec.Struct, frozen=True):
    model: str
    overrides: dict[str, int]
    store: str
    """The store with the images."""
    refs: list[MediaRef]
    writable: str = ""
    """A store that this interpreter must be able to write to; empty for none."""


class CheckedImage(msgspec.Struct, frozen=True):
    num_tokens: int
    fingerprint: str
    pixel_digest: str


class PixelCheckResult(msgspec.Struct, frozen=True):
    images: list[CheckedImage] = []
    problem: str = ""
    fix: str = ""


def check_pixels(request: PixelCheckRequest) -> list[CheckedImage]:
    """Render every image and compute its pixels; raise if the two do not agree."""
    if request.writable:
        MediaStore(Path(request.writable)).check_writable()
    store = MediaStore(Path(request.store))
    family = load_family(request.model, **request.overrides)
    renderer = load_renderer(request.model, store, family)
    materializer = Materializer(family, store, max_bytes=1 << 26)
    images = []
    for ref in request.refs:
        rendered = renderer.render([user(ref, "?")])
        [slot] = rendered.slots
        pixels = materializer.get(slot.item)
        if len(pixels.patches) != slot.item.num_patches:
            raise Misaligned(
                f"by its layout, an image of {ref.width}x{ref.height} has {slot.item.num_patches} "
                f"patches, but the processor produces {len(pixels.patches)}",
                "use the processor settings of the same checkpoint",
            )
        images.append(CheckedImage(slot.length, slot.item.fingerprint, pixels.digest))
    materializer.close()
    return images


def main() -> None:
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=PixelCheckRequest)
        result = PixelCheckResult(check_pixels(request))
    except SightlineError as error:
        result = PixelCheckResult(problem=error.problem, fix=error.fix)
    print("\n" + msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
