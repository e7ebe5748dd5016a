"""Structs to bytes and back: what cannot be read, or is of another schema, is a `WireError`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from sightline.errors import WireError

Message = TypeVar("Message")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises about bytes: of the wrong shape, text that is no UTF-8, nested too deeply."""
_FIX = "run the same version of sightline on both sides"


class Codec(Generic[Message]):
    """MessagePack of one kind of message, which `name` calls by name in errors."""

    def __init__(self, kind: Any, name: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._name = name

    def encode(self, message: Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Message:
        try:
            return self._decoder.decode(data)
        except UNREADABLE as error:
            raise WireError(f"{len(data)} bytes are not {self._name}: {error}", _FIX) from error


def check_schema(found: int, known: int, name: str) -> None:
    if found != known:
        raise WireError(f"{name} of schema {found}, this is {known}", _FIX)
