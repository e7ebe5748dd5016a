"""Bodies of requests read up to a size, and answers: JSON, and errors in a dialect of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sightline.errors import EngineError, SightlineError
from sightline.inference.errors import build_engine_error, encode_error, to_engine_error

CLIENT_CLOSED = 499
JSON = "application/json"

Handler = Callable[[Request], Awaitable[Response]]


async def read_body(http: Request, max_bytes: int) -> bytes:
    declared_size = http.headers.get("content-length", "")
    if declared_size.isdigit() and int(declared_size) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> EngineError:
    return build_engine_error("too_large", f"the body has more than {max_bytes} bytes", "send less")


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def error_response(error: SightlineError) -> Response:
    """An error as the generate protocol shows it."""
    status, body, headers = encode_error(to_engine_error(error))
    return Response(body, status, headers, media_type=JSON)


def answer_errors(
    handler: Handler, respond: Callable[[SightlineError], Response] = error_response
) -> Handler:
    """`handler`, whose errors `respond` turns into answers: a bug costs one request."""

    async def handle(http: Request) -> Response:
        try:
            return await handler(http)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        except SightlineError as error:
            return respond(error)
        except Exception as error:  # at the edge of the server, which goes on
            return respond(to_engine_error(error))

    return handle
