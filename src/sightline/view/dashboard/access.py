"""Access control and security headers for the dashboard.

All servers share `RequestGuard`, which makes the decisions. A browser sends the token in the
address once, and the answer sets it as a cookie.
"""

from __future__ import annotations

from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sightline.transport.http_server import RequestGuard

COOKIE = "sightline_token"
POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'",
        "media-src 'self'",
        "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    )
)  # fmt: skip
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class AccessMiddleware:
    """Refuses unauthorized requests and sets the headers of all answers."""

    def __init__(self, app: ASGIApp, guard: RequestGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard is read-only", 405)
        path, guard = request.scope["path"], self._guard
        query = dict(request.query_params)
        if guard.token and guard.is_token(query.pop("token", "")):
            # Remove the token from the address bar, so that shared links do not contain it.
            # A path that starts with two slashes would name another host.
            to = "/" + path.lstrip("/") + (f"?{urlencode(query)}" if query else "")
            moved = RedirectResponse(to, 303)
            moved.set_cookie(COOKIE, guard.token, httponly=True, samesite="strict")
            return moved
        cookie = request.cookies.get(COOKIE, "")
        error = guard.find_refusal(request.method, path, request.headers, cookie)
        return None if error is None else PlainTextResponse(str(error), error.status)
