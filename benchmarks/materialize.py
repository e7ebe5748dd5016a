"""`python -m benchmarks materialize`: image preprocessing, compared with transformers."""

from __future__ import annotations

import argparse
import io
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.reference_processors import (
    load_processor,
    prepare_torchvision,
    set_threads,
)
from sightline.bench.harness.screenshots import Screenshots
from sightline.bench.harness.workspace import (
    add_options,
    print_table,
    work_folder,
)
from sightline.errors import ConfigError
from sightline.families import Family, load_family
from sightline.media import MediaRef, MediaStore
from sightline.media.decode import open_rgb
from sightline.pixels.pixels import pixel_digest

SIZES = ("1280x800", "1280x720", "1920x1080")
JPEG_QUALITY = 90
STAGES = ("read", "decode", "resize", "gather", "digest")

Timed = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Measured:
    """Figures of one image size: medians of interleaved repeats."""

    size: str
    is_resized: bool
    ms: dict[str, float]
    """CPU time, which excludes waiting for a core."""
    wall_ms: dict[str, float]
    sent_mb: float
    """Megabytes of our patches, as sent to the device."""
    float_mb: float
    is_equal: bool
    off: float | None
    """Largest difference between torchvision's rows and ours; None without torchvision."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turns a decoded screenshot into what is sent to the device, on one thread: "
        "our uint8 patches, and the float rows of transformers' Pillow processor (and of its "
        "torchvision one, where that is importable). Both are compared in the same run, after our "
        "table has turned ours into floats. It also measures PNG and JPEG bytes, with the "
        "shares of decoding, resizing, gathering and digest."
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="default: %(default)s")
    add_options(parser, "model", repeats=15)


def run(args: argparse.Namespace) -> int:
    sizes = [_size(text) for text in args.sizes]
    set_threads(1)
    has_torchvision = prepare_torchvision()
    with work_folder(args) as folder:
        family, store = load_family(args.model), MediaStore(folder / "media")
        pillow = load_processor(args.model, "pil")
        torchvision = load_processor(args.model, "torchvision") if has_torchvision else None
        results = [
            measure(family, store, size, args.repeats, pillow, torchvision) for size in sizes
        ]
    print(f"one thread, {args.repeats} repeats in turns: medians, ms of CPU time")
    columns = ("image", "resized", "ours", "resize", "gather", "Pillow", "times", "by wall clock",
               "torchvision", "times", "sent MB", "as floats")  # fmt: skip
    print_table("from a decoded image to what is sent", columns, decoded_rows(results), width=130)
    shares = ("image", "file", "ours", *STAGES, "Pillow", "times")
    title = "from the bytes of a file, digest included"
    print_table(title, shares, bytes_rows(results), closing_lines(results), width=130)
    return 0 if all(result.is_equal for result in results) else 1


def measure(
    family: Family,
    store: MediaStore,
    size: tuple[int, int],
    repeats: int,
    pillow: Any,
    torchvision: Any,
) -> Measured:
    ref, files = _screenshot(store, *size)
    item, image = family.item(ref), store.image(ref)
    patches = family.patches(image, item)
    layout = family.layout(*size)
    fitted_size = (layout.width, layout.height)
    # An image that already has the fitted size needs only the gather.
    fitted = store.put(image.resize(fitted_size))
    fitted_item, fitted_image = family.item(fitted), store.image(fitted)
    timed: Timed = {
        "ours": lambda: family.patches(image, item),
        "gather": lambda: family.patches(fitted_image, fitted_item),
        "digest": lambda: pixel_digest(item, patches),
        "read": lambda: store.get(ref),
        "decode png": lambda: open_rgb(files["png"]),
        "decode jpeg": lambda: open_rgb(files["jpeg"]),
        "pillow": lambda: pillow(image),
    }
    if torchvision is not None:
        timed["torchvision"] = lambda: torchvision(image)
    ms, wall_ms = take_turns(timed, repeats)
    rows: Any = family
    ours = rows.rows(patches)
    theirs = pillow(image).numpy()
    other = None if torchvision is None else torchvision(image).numpy()
    return Measured(
        size=f"{size[0]}x{size[1]}",
        is_resized=fitted_size != size,
        ms=ms,
        wall_ms=wall_ms,
        sent_mb=patches.nbytes / 1e6,
        float_mb=theirs.nbytes / 1e6,
        is_equal=ours.shape == theirs.shape and bool((ours == theirs).all()),
        off=None if other is None else float(abs(other - ours).max()),
    )


def take_turns(timed: Timed, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return median CPU and wall times. Calls are interleaved, so that noise affects all."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for number in range(repeats + 1):
        for name, function in timed.items():
            began = time.process_time(), time.perf_counter()
            function()
            ended = time.process_time(), time.perf_counter()
            if number:  # the first round warms up
                spent[name].append((ended[0] - began[0], ended[1] - began[1]))
    cpu, wall = (
        {
            name: 1e3 * statistics.median(sample[clock] for sample in all_)
            for name, all_ in spent.items()
        }
        for clock in (0, 1)
    )
    return cpu, wall


def decoded_rows(found: list[Measured]) -> Iterator[list[str]]:
    for image_row in found:
        ms = image_row.ms
        other = ms.get("torchvision")
        yield [
            image_row.size,
            "yes" if image_row.is_resized else "no",
            f"{ms['ours']:.2f}",
            f"{max(ms['ours'] - ms['gather'], 0):.2f}" if image_row.is_resized else "-",
            f"{ms['gather']:.2f}",
            f"{ms['pillow']:.1f}",
            f"{ms['pillow'] / ms['ours']:.1f}x",
            f"{image_row.wall_ms['pillow'] / image_row.wall_ms['ours']:.1f}x",
            "absent" if other is None else f"{other:.1f}",
            "-" if other is None else f"{other / ms['ours']:.1f}x",
            f"{image_row.sent_mb:.2f}",
            f"{image_row.float_mb:.1f}",
        ]


def bytes_rows(found: list[Measured]) -> Iterator[list[str]]:
    """Yield the rows of the file table. Ours includes a digest. Both decode the same way."""
    for image_row in found:
        for kind in ("png", "jpeg"):
            parts = stages(image_row, kind)
            ours = sum(parts.values())
            theirs = image_row.ms["read"] + image_row.ms[f"decode {kind}"] + image_row.ms["pillow"]
            yield [
                image_row.size,
                kind.upper(),
                f"{ours:.1f}",
                *(f"{100 * parts[name] / ours:.0f}%" for name in STAGES),
                f"{theirs:.1f}",
                f"{theirs / ours:.1f}x",
            ]


def stages(one: Measured, kind: str) -> dict[str, float]:
    """Return the ms of each of our stages. Reading includes the check of the bytes' digest."""
    ms = one.ms
    resize = max(ms["ours"] - ms["gather"], 0.0) if one.is_resized else 0.0
    return {
        "read": ms["read"],
        "decode": ms[f"decode {kind}"],
        "resize": resize,
        "gather": ms["ours"] - resize,
        "digest": ms["digest"],
    }


def closing_lines(found: list[Measured]) -> list[str]:
    lines = [
        f"{result.size}: {'bit-equal to' if result.is_equal else 'DIFFERS FROM'} the Pillow "
        "processor, after our table"
        + ("" if result.off is None else f"; torchvision is off by {result.off:.2g} at most")
        for result in found
    ]
    if any(result.off is None for result in found):
        lines.append("torchvision is not importable here: its column is absent")
    return lines


def _screenshot(store: MediaStore, width: int, height: int) -> tuple[MediaRef, dict[str, bytes]]:
    """Store a page in RGB. Return its ref, and its bytes as PNG and as JPEG."""
    page = store.image(store.put(Screenshots(1, width, height).draw(random.Random(0))))
    ref = store.put(page)
    jpeg = io.BytesIO()
    page.save(jpeg, "JPEG", quality=JPEG_QUALITY)
    return ref, {"png": store.get(ref), "jpeg": jpeg.getvalue()}


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise ConfigError(f"--sizes {text} is not a size", "write WIDTHxHEIGHT, such as 1280x800")
    return int(width), int(height)
