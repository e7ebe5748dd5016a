"""Structs to bytes and back: what cannot be read, or is of another schema, is a `WireError`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

import sightline
from sightline.errors import WireError

Message = TypeVar("Message")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises about bytes: of the wrong shape, text that is no UTF-8, nested too deeply."""
MAX_JSON_VALUES = 1_000_000
"""Values of a request in JSON, beside a token or a word for each that a sequence may have."""
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

    def decode_from(self, peer: str, data: bytes) -> Message:
        """What `peer` sent; the error names it."""
        try:
            return self.decode(data)
        except WireError as error:
            raise WireError(f"{peer} sent {error.problem}", error.fix) from error


def find_json_excess(body: bytes, max_model_len: int) -> str:
    """Says how many values JSON may hold if it is more than are decoded; empty if not.

    A value takes 3 bytes of JSON and 100 of memory. Marks are counted, so that those in texts,
    which are tokens, count too.
    """
    num_values = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    most = MAX_JSON_VALUES + max_model_len
    return f"{num_values} values, and at most {most} are decoded" if num_values > most else ""


def get_release() -> str:
    """What a process says of itself at a handshake."""
    return f"sightline {sightline.__version__}"


def check_release(found: str, who: str) -> None:
    """Refuses a process of another version, which may mean other things by the same words."""
    if found != get_release():
        raise WireError(
            f"{who} runs {found or 'an older sightline'}, this is {get_release()}", _FIX
        )


def check_schema(found: int, known: int, name: str, oldest: int | None = None) -> None:
    """Refuse a schema other than `known`, or outside of `oldest` to `known`."""
    if not (known if oldest is None else oldest) <= found <= known:
        raise WireError(f"{name} of schema {found}, this is {known}", _FIX)
