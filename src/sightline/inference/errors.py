"""Error responses with a stable type, an HTTP status and, if a retry may help, `Retry-After`.

Also reads request bodies with a size limit."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sightline import errors
from sightline.errors import EngineError, MediaError, SightlineError
from sightline.transport.http_server import json_response, receive_body
from sightline.wire.generate import WEIGHTS_UNAVAILABLE, ErrorAnswer, ErrorBody

RETRY_AFTER_S = 1
MAX_BODY_BYTES = 64 << 20
CLIENT_CLOSED = 499

Handler = Callable[[Request], Awaitable[Response]]

_TYPES_BY_STATUS = {
    400: ("schema", "model", "token_ids", "too_long", "sampling", "slots", "pads"),
    401: ("unauthorized",),
    403: ("origin", "control"),
    404: ("media_missing", "unknown_url"),
    405: ("method",),
    408: ("unfinished",),
    409: ("fingerprint", "leased"),
    413: ("too_large",),
    415: ("content_type",),
    421: ("host",),
    422: ("media_corrupt", "media_undecodable", "media_refused", "weights"),
    500: ("not_finite", "engine"),
    503: ("overloaded", "media_unavailable", WEIGHTS_UNAVAILABLE, "stopping"),
    507: ("store_full",),
}
STATUS_BY_TYPE = {kind: status for status, kinds in _TYPES_BY_STATUS.items() for kind in kinds}
"""HTTP status of each error type. See docs/serving_api.md."""

# The first match decides, so subclasses come before `MediaError`.
_TYPE_BY_CLASS: tuple[tuple[type[SightlineError], str], ...] = (
    (errors.FingerprintMismatch, "fingerprint"),
    (errors.MediaMissing, "media_missing"),
    (errors.MediaCorrupt, "media_corrupt"),
    (errors.MediaUndecodable, "media_undecodable"),
    (errors.StoreFull, "store_full"),
    (MediaError, "media_refused"),
    (errors.WireError, "schema"),
    (errors.PromptTooLong, "too_long"),
    (errors.MessageError, "schema"),
    (errors.Misaligned, "slots"),
    (errors.WeightsError, "weights"),
)


def build_engine_error(kind: str, problem: str, fix: str) -> EngineError:
    return EngineError(problem, fix, kind, STATUS_BY_TYPE[kind])


def to_engine_error(error: BaseException) -> EngineError:
    """Convert any exception. An unexpected one becomes a 500, and its traceback is logged."""
    if isinstance(error, EngineError):
        return error
    # The store raises exactly this class if a file is temporarily unreadable. Decoders raise
    # subclasses, also with an OSError as cause, for files that are permanently damaged.
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
    return build_engine_error("stopping", "the server is shutting down", fix)


def not_finite_error() -> EngineError:
    fix = "check the last published weights for NaN"
    return build_engine_error("not_finite", "the model's logits are not finite", fix)


async def read_body(http: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    return b"".join(await receive_body(http, max_bytes, "too_large"))


def error_response(error: SightlineError) -> Response:
    """Return an error in the format of the generate protocol."""
    refusal = to_engine_error(error)
    path = refusal.path if refusal.status == 400 else ""
    body = ErrorBody(refusal.short_problem, refusal.kind, refusal.status, refusal.fix, path)
    headers = {"retry-after": str(RETRY_AFTER_S)} if refusal.status == 503 else {}
    return json_response(ErrorAnswer(body), refusal.status, headers)


def answer_errors(
    handler: Handler, respond: Callable[[SightlineError], Response] = error_response
) -> Handler:
    """Wrap `handler` so that `respond` answers its errors. A bug fails one request only."""

    async def handle(http: Request) -> Response:
        try:
            return await handler(http)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        except SightlineError as error:
            return respond(error)
        except Exception as error:  # the server continues
            return respond(to_engine_error(error))

    return handle
