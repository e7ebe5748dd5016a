"""Reads the body of an HTTP request, up to a size."""

from __future__ import annotations

from starlette.requests import Request

from sightline.errors import EngineError
from sightline.inference.errors import build_engine_error


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
