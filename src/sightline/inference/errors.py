"""Errors as the wire shows them: a stable type, a status, and whether trying again may help."""

from __future__ import annotations

import msgspec

from sightline.errors import (
    EngineError,
    FingerprintMismatch,
    MediaCorrupt,
    MediaError,
    MediaMissing,
    MediaRefused,
    MediaUndecodable,
    MessageError,
    Misaligned,
    SightlineError,
    WireError,
)
from sightline.wire.generate import ErrorAnswer, ErrorBody

RETRY_AFTER_S = 1

# The first class that fits decides, so the narrow ones stand before `MediaError`.
_TYPES: tuple[tuple[type[SightlineError], int, str], ...] = (
    (FingerprintMismatch, 409, "fingerprint"),
    (MediaMissing, 404, "media_missing"),
    (MediaCorrupt, 422, "media_corrupt"),
    (MediaUndecodable, 422, "media_undecodable"),
    (MediaRefused, 422, "media_refused"),
    (MediaError, 422, "media_refused"),
    (WireError, 400, "schema"),
    (MessageError, 400, "schema"),
    (Misaligned, 400, "slots"),
)


def refusal(kind: str, problem: str, fix: str, status: int = 400) -> EngineError:
    return EngineError(problem, fix, kind, status)


def typed(error: BaseException) -> EngineError:
    """`error` with its place in the table; what nobody foresaw becomes a 500."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, OSError):
        return refusal("media_unavailable", str(error), "check the store, and try again", 503)
    # The exact class: decoders, too, raise an OSError for a file that is damaged for good.
    if type(error) is MediaError and isinstance(error.__cause__, OSError):
        return EngineError(error.problem, error.fix, "media_unavailable", 503)
    for cls, status, kind in _TYPES:
        if isinstance(error, cls):
            return EngineError(error.problem, error.fix, kind, status)
    if isinstance(error, SightlineError):
        return EngineError(error.problem, error.fix, "engine", 500)
    return refusal("engine", f"{type(error).__name__}: {error}", "see the server's log", 500)


def answer(error: EngineError) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers."""
    body = ErrorBody(error.problem, error.kind, error.status, error.fix)
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else {}
    return error.status, msgspec.json.encode(ErrorAnswer(body)), headers
