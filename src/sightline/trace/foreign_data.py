"""Bytes that are no trace of ours: what they are, and what of them cannot be used, in words.

Nothing is unpickled, unpacked or run. The first bytes tell the format; of JSON and msgpack, which
hold plain values only, the values are walked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sightline.errors import WireError

MAX_FOREIGN_BYTES = 64 << 20
"""Of a file; more of a foreign one is not read."""
_MAX_VALUES = 500_000
_PIXEL_NAMES = ("pixel", "image_embed", "image_feature", "mm_kwargs", "multi_modal_inputs")
_OWN_NAMES = ("pixel_digest", "pixel_digests")
_IMAGE_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8")

PIXELS = "processed pixels"
ENCODED = "images in base64"
INLINE = "bytes of images"
ARRAYS = "packed arrays"

PIXELS_FIX = (
    "processed pixels cannot be used: they fit one processor and no image can be told from them. "
    "Put the images themselves into a store with `sightline media put` and roll out again"
)
_FIXES = {
    PIXELS: PIXELS_FIX,
    ARRAYS: PIXELS_FIX,
    ENCODED: "images in base64 cannot be used where they stand: send the messages again through "
    "a chat, which stores each image once",
    INLINE: "write the images to files and put them with `sightline media put`",
}
_FIX = "read files of a run's traces/, which sightline wrote"


@dataclass
class UnusableData:
    """Places of what cannot be used, by kind."""

    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, path: str, size: str = "") -> None:
        self.places.setdefault(kind, []).append(path + (f" ({size})" if size else ""))

    def __str__(self) -> str:
        texts = []
        for kind, paths in self.places.items():
            more = f" and at {len(paths) - 1} more places" if len(paths) > 1 else ""
            texts.append(f"{kind} at {paths[0]}{more}")
        return "; ".join(texts)

    @property
    def fix(self) -> str:
        return next((fix for kind, fix in _FIXES.items() if kind in self.places), _FIX)


def build_foreign_data_error(data: bytes, problem: str, otherwise: str = _FIX) -> WireError:
    """The error about bytes that are no trace: `problem`, what they are and what they hold.

    `otherwise` is the cure where nothing in them is known to be unusable.
    """
    kind, values, fix = _identify(data)
    found = find_unusable_data(values)
    told = "; ".join(text for text in (kind, f"it holds {found}" if found.places else "") if text)
    return WireError(
        f"{problem}{': ' if told else ''}{told}", found.fix if found.places else fix or otherwise
    )


def find_unusable_data(values: Any) -> UnusableData:
    """Pixels and encoded images among plain values, each with its JSON path."""
    found, left = UnusableData(), [("$", values)]
    for _ in range(_MAX_VALUES):
        if not left:
            break
        path, value = left.pop()
        if isinstance(value, dict):
            for name, inner in reversed(value.items()):
                place = f"{path}.{name}"
                if _names_pixels(name) and isinstance(inner, (list, dict, bytes, str)) and inner:
                    found.add(PIXELS, place, _describe_size(inner))
                else:
                    left.append((place, inner))
        elif isinstance(value, list):
            if _is_matrix(value):
                found.add(PIXELS, path, _describe_size(value))
            elif value and not isinstance(value[0], (int, float)):
                left += [(f"{path}[{i}]", value[i]) for i in reversed(range(len(value)))]
        elif isinstance(value, str) and value.startswith("data:"):
            found.add(ENCODED, path, f"{len(value)} characters")
        elif isinstance(value, bytes) and value.startswith(_IMAGE_MAGIC):
            found.add(INLINE, path, f"{len(value)} bytes")
        elif isinstance(value, msgspec.msgpack.Ext):
            found.add(ARRAYS, path, f"extension {value.code}, {len(bytes(value.data))} bytes")
    return found


def _names_pixels(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in _OWN_NAMES
        and any(part in name.lower() for part in _PIXEL_NAMES)
    )


def _is_matrix(value: list[Any]) -> bool:
    """Rows of fractions: token ids and logprobs are single rows."""
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


# --- what it is


def _identify(data: bytes) -> tuple[str, Any, str]:
    """What the bytes are, the plain values in them, and what to do."""
    kind, fix = next(_identify_binary(data), ("", ""))
    if kind:
        return kind, None, fix
    kind, values = next(_decode_plain(data), ("", None))
    return kind, values, ""


def _identify_binary(data: bytes) -> Iterator[tuple[str, str]]:
    head = data[:4096]
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        yield (
            "it is a Python pickle, as torch.save and pickle.dump write it, and was not opened: "
            "unpickling runs whatever code is in it; tensors in it are processed data",
            PIXELS_FIX,
        )
    if head.startswith(b"PK\x03\x04"):
        if b"data.pkl" in head:
            yield (
                "it is a file of torch.save and was not opened: unpickling runs whatever code is "
                "in it; tensors in it are processed data",
                PIXELS_FIX,
            )
        kind = "numpy arrays" if b".npy" in head else "a zip archive"
        yield f"it is {kind}", PIXELS_FIX if b".npy" in head else "unpack it first"
    if head.startswith(b"\x93NUMPY"):
        yield "it is a numpy array", PIXELS_FIX
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 27:
        yield "it is a safetensors file of tensors", PIXELS_FIX
    if head.startswith((b"PAR1", b"ARROW1")):
        yield "it is a table (parquet or arrow)", _FIX
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        yield "it is compressed", "decompress it first"


def _decode_plain(data: bytes) -> Iterator[tuple[str, Any]]:
    text = data.lstrip()
    if text[:1] in (b"{", b"["):
        for part, kind in ((text, "JSON"), (text.split(b"\n", 1)[0], "JSON lines")):
            try:
                values = msgspec.json.decode(part)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            yield f"it is {kind}{_describe_keys(values)}", values
        return
    try:
        values = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return
    if isinstance(values, (dict, list)):
        yield f"it is msgpack{_describe_keys(values)}", values


def _describe_keys(values: Any) -> str:
    first = values[0] if isinstance(values, list) and values else values
    if not isinstance(first, dict):
        return ""
    names = [str(name)[:30] for name in list(first)[:6]]
    more = ", ..." if len(first) > len(names) else ""
    return f" with the keys {', '.join(names)}{more}"
