"""Reads the body of an HTTP request, up to a size."""

from __future__ import annotations

from starlette.requests import Request

from sightline.errors import EngineError
from sightline.inference.errors import refusal


async def read_body(http: Request, most: int) -> bytes:
    size_said = http.headers.get("content-length", "")
    if size_said.isdigit() and int(size_said) > most:
        raise _too_large(most)
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> EngineError:
    return refusal("too_large", f"the body has more than {most} bytes", "send less")
