"""Encode traces as bytes and files. Writing is strict. Every older schema can be read.

A file starts with a line that names its format. The traces follow. Each is preceded by its length
as a four-byte big-endian integer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sightline.errors import SightlineError, WireError
from sightline.regular_file import open_file
from sightline.trace.trace import TRACE_SCHEMA, Trace
from sightline.wire.codec import UNREADABLE
from sightline.wire.file import write_atomic

FILE_MAGIC = b"sightline traces 1\n"
_FIX = (
    "read files of a run's traces/, which sightline wrote. Other formats cannot be converted, "
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
                f"{what} is a trace of schema {schema}. This sightline reads {min(_readers)} to "
                f"{TRACE_SCHEMA}",
                "upgrade sightline to the version that wrote it, or a later one",
            )
        return _readers[schema](data)
    except UNREADABLE as error:
        raise WireError(f"{what} is not a trace: {error}", _FIX) from error


def encode_traces(traces: Iterable[Trace]) -> bytes:
    """Return the bytes of a trace file. Routes are left out, because they are the largest part."""
    parts = [FILE_MAGIC]
    for trace in traces:
        nodes = [msgspec.structs.replace(node, routes=None) for node in trace.nodes]
        data = encode_trace(msgspec.structs.replace(trace, nodes=nodes))
        parts += [len(data).to_bytes(4, "big"), data]
    return b"".join(parts)


def write_traces(path: Path | str, traces: Iterable[Trace]) -> None:
    """Write `traces` to `path` atomically."""
    write_atomic(Path(path), encode_traces(traces))


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A trace and its position in its file."""

    number: int
    start: int
    """Offset of its first byte, after the length."""
    size: int
    trace: Trace


def read_records(path: Path | str) -> Iterator[TraceRecord | SightlineError]:
    """Yield the traces of a file, and an error without the file's name for each unreadable one.

    A damaged trace does not affect the others. A truncated file loses only its end.
    """
    with open_file(path) as file:
        if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
            yield WireError("not a trace file", _FIX)
            return
        end = os.fstat(file.fileno()).st_size
        number = 0
        while head := file.read(4):
            start, size = file.tell(), int.from_bytes(head, "big")
            if len(head) < 4 or start + size > end:
                fix = "the file was cut off while it was copied; copy it again"
                yield WireError(f"ends inside trace {number}", fix)
                return
            try:
                trace = decode_trace(file.read(size), f"trace {number}")
                yield TraceRecord(number, start, size, trace)
            except SightlineError as error:
                yield error
            number += 1


def read_traces(path: Path | str) -> Iterator[Trace]:
    """Yield the traces of a file. Raise at the first unreadable one."""
    for record in read_records(path):
        if isinstance(record, SightlineError):
            raise WireError(f"{path}: {record.problem}", record.fix) from record
        yield record.trace
