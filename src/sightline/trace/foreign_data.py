"""Describes bytes that are not a trace: their format, and data in them that cannot be used.

Nothing is unpickled, unpacked or run. The first bytes identify the format. Only JSON and msgpack,
which hold plain values, are searched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import msgspec

from sightline.errors import WireError

MAX_FOREIGN_BYTES = 64 << 20
"""The number of bytes to read from a foreign file."""
_MAX_VALUES = 500_000
_PIXEL_NAMES = ("pixel", "image_embed", "image_feature", "mm_kwargs", "multi_modal_inputs")
_OWN_NAMES = ("pixel_digest", "pixel_digests")
_IMAGE_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8")

PIXELS = "processed pixels"
ENCODED = "images in base64"
INLINE = "bytes of images"
ARRAYS = "packed arrays"

PIXELS_FIX = (
    "processed pixels cannot be used: they fit one processor, and the image cannot be restored. "
    "Put the images themselves into a store with `sightline media put` and roll out again"
)
_FIXES = {
    PIXELS: PIXELS_FIX,
    ARRAYS: PIXELS_FIX,
    ENCODED: "images in base64 cannot be used as they are: send the messages again through "
    "a chat, which stores each image once",
    INLINE: "write the images to files and put them with `sightline media put`",
}
_FIX = "read files of a run's traces/, which sightline wrote"


def build_foreign_data_error(data: bytes, problem: str, otherwise: str = _FIX) -> WireError:
    """Return the error for bytes that are not a trace, with their format and contents.

    `otherwise` is the fix if they hold nothing that is known to be unusable.
    """
    kind, values, fix = _identify(data)
    unusable = find_unusable_data(values)
    contents = "; ".join(_describe_places(*entry) for entry in unusable.items())
    if contents:
        fix = next(fix for name, fix in _FIXES.items() if name in unusable)
    known = "; ".join(part for part in (kind, contents and f"it holds {contents}") if part)
    return WireError(f"{problem}: {known}" if known else problem, fix or otherwise)


def _describe_places(kind: str, places: list[str]) -> str:
    more = f" and at {len(places) - 1} more places" if len(places) > 1 else ""
    return f"{kind} at {places[0]}{more}"


def find_unusable_data(values: Any) -> dict[str, list[str]]:
    """Return the JSON paths of pixels and encoded images among plain values, by kind."""
    places, left = defaultdict[str, list[str]](list), [("$", values)]
    for _ in range(_MAX_VALUES):
        if not left:
            break
        path, value = left.pop()
        if isinstance(value, dict):
            for name, inner in reversed(value.items()):
                place = f"{path}.{name}"
                if _names_pixels(name) and isinstance(inner, (list, dict, bytes, str)) and inner:
                    places[PIXELS].append(f"{place} ({_describe_size(inner)})")
                else:
                    left.append((place, inner))
        elif isinstance(value, list):
            if _is_matrix(value):
                places[PIXELS].append(f"{path} ({_describe_size(value)})")
            elif value and not isinstance(value[0], (int, float)):
                left += [(f"{path}[{i}]", value[i]) for i in reversed(range(len(value)))]
        elif isinstance(value, str) and value.startswith("data:"):
            places[ENCODED].append(f"{path} ({len(value)} characters)")
        elif isinstance(value, bytes) and value.startswith(_IMAGE_MAGIC):
            places[INLINE].append(f"{path} ({len(value)} bytes)")
        elif isinstance(value, msgspec.msgpack.Ext):
            places[ARRAYS].append(
                f"{path} (extension {value.code}, {len(bytes(value.data))} bytes)"
            )
    return places


def _names_pixels(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in _OWN_NAMES
        and any(part in name.lower() for part in _PIXEL_NAMES)
    )


def _is_matrix(value: list[Any]) -> bool:
    """Return whether these are rows of floats; token ids and logprobs are single rows."""
    first = value[0] if value else None
    return isinstance(first, list) and bool(first) and isinstance(first[0], float)


def _describe_size(value: Any) -> str:
    sides, inner = [], value
    while isinstance(inner, list) and inner:
        sides.append(str(len(inner)))
        inner = inner[0]
    if sides:
        return " x ".join(sides) + (" numbers" if isinstance(inner, (int, float)) else " values")
    return f"{len(value)} {'keys' if isinstance(value, dict) else 'bytes'}"


_NOT_OPENED = "and was not opened, because unpickling runs code; tensors in it are processed data"
_BINARY_FORMATS = (
    (
        rb"\x80[\x02-\x05]",
        f"a Python pickle, as torch.save and pickle.dump write it, {_NOT_OPENED}",
        PIXELS_FIX,
    ),
    (rb"PK\x03\x04.*data\.pkl", f"a file of torch.save {_NOT_OPENED}", PIXELS_FIX),
    (rb"PK\x03\x04.*\.npy", "numpy arrays", PIXELS_FIX),
    (rb"PK\x03\x04", "a zip archive", "unpack it first"),
    (rb"\x93NUMPY", "a numpy array", PIXELS_FIX),
    (rb".{3}[\x00-\x07]\x00{4}\{", "a safetensors file of tensors", PIXELS_FIX),
    (rb"PAR1|ARROW1", "a table (parquet or arrow)", _FIX),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd", "compressed", "decompress it first"),
)
"""The first bytes of a format, its description, and the fix."""


def _identify(data: bytes) -> tuple[str, Any, str]:
    """Return the format of the bytes, the plain values in them, and the fix."""
    for pattern, kind, fix in _BINARY_FORMATS:
        if re.match(pattern, data[:4096], re.DOTALL):
            return f"it is {kind}", None, fix
    text = data.lstrip()
    decode = msgspec.json.decode if text[:1] in (b"{", b"[") else msgspec.msgpack.decode
    parts = {"msgpack": data}
    if decode is msgspec.json.decode:
        parts = {"JSON": text, "JSON lines": text.split(b"\n", 1)[0]}
    for kind, part in parts.items():
        try:
            values = decode(part)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            continue
        if isinstance(values, (dict, list)):
            return f"it is {kind}{_describe_keys(values)}", values, ""
    return "", None, ""


def _describe_keys(values: Any) -> str:
    first = values[0] if isinstance(values, list) and values else values
    if not isinstance(first, dict):
        return ""
    names = [str(name)[:30] for name in list(first)[:6]]
    more = ", ..." if len(first) > len(names) else ""
    return f" with the keys {', '.join(names)}{more}"
