"""Encoding of structs as bytes. Unreadable bytes raise a `WireError`."""

from __future__ import annotations

import importlib.metadata
from functools import reduce
from operator import or_
from typing import Any, Generic, TypeVar

import msgspec

import sightline
from sightline.errors import WireError

Message = TypeVar("Message")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bad bytes: wrong shape, invalid UTF-8, too deep nesting."""
MAX_JSON_VALUES = 1_000_000
"""Maximum number of values in a JSON request, in addition to one per token of a sequence."""
_FIX = "run the same version of sightline on both sides"


class Codec(Generic[Message]):
    """MessagePack encoder and decoder of one kind of message, or of the tagged subclasses of
    `kind`. Errors call it `name`."""

    def __init__(self, kind: type[Message], name: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        kinds: Any = reduce(or_, kind.__subclasses__() or [kind])
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kinds)
        self._name = name

    def encode(self, message: Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Message:
        try:
            return self._decoder.decode(data)
        except UNREADABLE as error:
            raise WireError(f"{len(data)} bytes are not {self._name}: {error}", _FIX) from error

    def decode_from(self, peer: str, data: bytes) -> Message:
        """Decode a message from `peer`, which errors name."""
        try:
            return self.decode(data)
        except WireError as error:
            raise WireError(f"{peer} sent {error.problem}", error.fix) from error


def find_json_excess(body: bytes, max_model_len: int) -> str:
    """Describe JSON that may hold too many values to decode. Empty if it does not.

    A value takes 3 bytes of JSON and 100 of memory. Separators inside strings count too.
    """
    num_values = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    most = MAX_JSON_VALUES + max_model_len
    return f"{num_values} values, and at most {most} are decoded" if num_values > most else ""


def get_release() -> str:
    """Return the version that a process reports in a handshake."""
    return f"sightline {sightline.__version__}"


def find_version(package: str) -> str:
    """Return the version of an installed package, or an empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_release(release: str, who: str) -> None:
    """Raise if a process runs a different version, whose messages may have different meanings."""
    if release != get_release():
        raise WireError(
            f"{who} runs {release or 'an older sightline'}, this is {get_release()}", _FIX
        )


def check_schema(schema: int, known: int, name: str, oldest: int | None = None) -> None:
    """Raise unless `schema` is `known`, or is in `oldest` to `known` if `oldest` is given."""
    if not (known if oldest is None else oldest) <= schema <= known:
        raise WireError(f"{name} of schema {schema}, this is {known}", _FIX)
