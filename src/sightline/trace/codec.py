"""Encode traces as bytes and files. Writing is strict. Every older schema can be read.

A file starts with a line that names its format. The traces follow. Each is preceded by its length
as a four-byte big-endian integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from sightline.errors import WireError
from sightline.trace.trace import TRACE_SCHEMA, Trace
from sightline.wire.codec import UNREADABLE
from sightline.wire.file import write_atomic

FILE_MAGIC = b"sightline traces 1\n"
_FIX = (
    "read files of a run's traces/, which sightline wrote; other formats cannot be converted, "
    "because pixels fit only the processor that computed them"
)


class _SchemaHeader(msgspec.Struct):
    """The one field that all schemas share."""

    schema: int


_encoder = msgspec.msgpack.Encoder()
_heads = msgspec.msgpack.Decoder(_SchemaHeader)
_readers: dict[int, Callable[[bytes], Trace]] = {1: msgspec.msgpack.Decoder(Trace).decode}


def encode_trace(trace: Trace) -> bytes:
    trace.check()
    return _encoder.encode(trace)


def decode_trace(data: bytes, what: str = "data") -> Trace:
    """Return the trace in `data`. `what` describes the data in errors."""
    try:
        schema = _heads.decode(data).schema
        if schema not in _readers:
            raise WireError(
                f"{what} is a trace of schema {schema}; this sightline reads {min(_readers)} to "
                f"{TRACE_SCHEMA}",
                "upgrade sightline to the version that wrote it, or a later one",
            )
        return _readers[schema](data)
    except UNREADABLE as error:
        raise WireError(f"{what} is not a trace: {error}", _FIX) from error


def encode_traces(traces: Iterable[Trace]) -> bytes:
    """Return the bytes of a trace file."""
    parts = [FILE_MAGIC]
    for trace in traces:
        data = encode_trace(trace)
        parts += [len(data).to_bytes(4, "big"), data]
    return b"".join(parts)


def write_traces(path: Path | str, traces: Iterable[Trace]) -> None:
    """Write `traces` to `path` atomically."""
    write_atomic(Path(path), encode_traces(traces))


def read_traces(path: Path | str) -> Iterator[Trace]:
    """Yield the traces of a file."""
    with open(path, "rb") as file:
        if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
            raise WireError(f"{path} is not a file of traces", _FIX)
        number = 0
        while size := file.read(4):
            data = file.read(int.from_bytes(size, "big"))
            if len(size) < 4 or len(data) < int.from_bytes(size, "big"):
                raise WireError(
                    f"{path} ends inside trace {number}",
                    "the file was cut off while it was copied; copy it again",
                )
            yield decode_trace(data, f"{path}, trace {number}")
            number += 1
