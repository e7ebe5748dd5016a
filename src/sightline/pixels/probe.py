"""How this interpreter lays out and makes a few images, asked of another one by `python -m`.

Interpreters with other decoders make other pixels. The launcher sends a request as JSON, and reads
the answers back as one line of JSON.
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


class ProbeRequest(msgspec.Struct, frozen=True):
    model: str
    overrides: dict[str, int]
    store: str
    """A store that holds the images."""
    refs: list[MediaRef]
    writable: str = ""
    """A store that this interpreter must be able to write to; empty for none."""


class ProbedImage(msgspec.Struct, frozen=True):
    num_tokens: int
    fingerprint: str
    pixel_digest: str


class ProbeAnswer(msgspec.Struct, frozen=True):
    images: list[ProbedImage] = []
    problem: str = ""
    fix: str = ""


def probe(request: ProbeRequest) -> list[ProbedImage]:
    """Renders every image and makes its pixels; raises where the two do not agree."""
    if request.writable:
        MediaStore(Path(request.writable)).check_writable()
    store = MediaStore(Path(request.store))
    family = load_family(request.model, **request.overrides)
    renderer = load_renderer(request.model, store, family)
    materializer = Materializer(family, store, max_bytes=1 << 26)
    found = []
    for ref in request.refs:
        rendered = renderer.render([user(ref, "?")])
        [slot] = rendered.slots
        pixels = materializer.get(slot.item)
        if len(pixels.patches) != slot.item.num_patches:
            raise Misaligned(
                f"an image of {ref.width}x{ref.height} has {slot.item.num_patches} patches by its "
                f"layout, and {len(pixels.patches)} were made",
                "use the processor settings of one checkpoint",
            )
        found.append(ProbedImage(slot.length, slot.item.fingerprint, pixels.digest))
    materializer.close()
    return found


def main() -> None:
    try:
        answer = ProbeAnswer(probe(msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)))
    except SightlineError as error:
        answer = ProbeAnswer(problem=error.problem, fix=error.fix)
    print("\n" + msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main()
