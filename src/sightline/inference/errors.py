"""Errors as the wire shows them: a stable type, a status, and whether trying again may help."""

from __future__ import annotations

import traceback

import msgspec

from sightline.errors import (
    EngineError,
    FingerprintMismatch,
    MediaCorrupt,
    MediaError,
    MediaMissing,
    MediaUndecodable,
    MessageError,
    Misaligned,
    SightlineError,
    WeightsError,
    WireError,
)
from sightline.wire.generate import ErrorAnswer, ErrorBody

RETRY_AFTER_S = 1

STATUS_BY_TYPE = {
    "schema": 400,
    "model": 400,
    "token_ids": 400,
    "too_long": 400,
    "sampling": 400,
    "slots": 400,
    "pads": 400,
    "media_missing": 404,
    "fingerprint": 409,
    "too_large": 413,
    "media_corrupt": 422,
    "media_undecodable": 422,
    "media_refused": 422,
    "weights": 422,
    "not_finite": 500,
    "engine": 500,
    "overloaded": 503,
    "media_unavailable": 503,
    "stopping": 503,
}
"""Every type, with its status; docs/serving.md says what they mean."""

# The first class that fits decides, so the narrow ones stand before `MediaError`.
_TYPE_BY_CLASS: tuple[tuple[type[SightlineError], str], ...] = (
    (FingerprintMismatch, "fingerprint"),
    (MediaMissing, "media_missing"),
    (MediaCorrupt, "media_corrupt"),
    (MediaUndecodable, "media_undecodable"),
    (MediaError, "media_refused"),
    (WireError, "schema"),
    (MessageError, "schema"),
    (Misaligned, "slots"),
    (WeightsError, "weights"),
)


def build_engine_error(kind: str, problem: str, fix: str) -> EngineError:
    return EngineError(problem, fix, kind, STATUS_BY_TYPE[kind])


def to_engine_error(error: BaseException) -> EngineError:
    """`error` with its place in the table; what nobody foresaw becomes a 500, with a traceback."""
    if isinstance(error, EngineError):
        return error
    # The store says so when a file cannot be read just now. The exact class: decoders, too, raise
    # an OSError for a file that is damaged for good.
    if type(error) is MediaError and isinstance(error.__cause__, OSError):
        return build_engine_error("media_unavailable", error.problem, error.fix)
    for cls, kind in _TYPE_BY_CLASS:
        if isinstance(error, cls):
            return build_engine_error(kind, error.problem, error.fix)
    if isinstance(error, SightlineError):
        return build_engine_error("engine", error.problem, error.fix)
    traceback.print_exception(error)
    return build_engine_error("engine", f"{type(error).__name__}: {error}", "see the server's log")


def stopping_error() -> EngineError:
    fix = "send the request to another server"
    return build_engine_error("stopping", "the server is ending", fix)


def not_finite_error() -> EngineError:
    fix = "check the weights that were published last"
    return build_engine_error("not_finite", "the model's logits are not numbers", fix)


def encode_error(error: EngineError) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers."""
    path = error.path if error.status == 400 else ""
    body = ErrorBody(error.problem, error.kind, error.status, error.fix, path)
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else {}
    return error.status, msgspec.json.encode(ErrorAnswer(body)), headers
