"""The body of a request while it is under way: received, read once, and let go.

A history of screenshots in base64 is far larger than anything else that a rollout holds, and an
answer may take minutes. So nothing else keeps it, and its bytes count while it is here.
"""

from __future__ import annotations

from aiohttp import web

from sightline.errors import EngineError


class RequestBody:
    """The bytes of one request, from its first chunk until they are parsed."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes received; they count on once taken, as what they are parsed into is as large."""
        self._parts: list[bytes] = []

    async def receive(self, http: web.Request, max_bytes: int) -> None:
        """Raises EngineError, before it reads on, when the body has more than `max_bytes` bytes."""
        if (http.content_length or 0) > max_bytes:
            raise _too_large_error(max_bytes)
        # Not http.read(): the request would keep what it returns until it is answered, and the
        # event loop would put it together.
        async for part, _ in http.content.iter_chunks():
            self._parts.append(part)
            self.num_bytes += len(part)
            if self.num_bytes > max_bytes:
                raise _too_large_error(max_bytes)

    def take(self) -> bytes:
        """The bytes, which are the caller's from here on."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _too_large_error(max_bytes: int) -> EngineError:
    return EngineError(
        f"the body has more than the {max_bytes} bytes that this server reads",
        "send fewer or smaller images: a window of the history, or media: urls of stored ones",
        kind="request_too_large",
        status=413,
    )
