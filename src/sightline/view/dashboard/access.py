"""Access control and security headers for the dashboard.

All servers share `RequestGuard`, which makes the decisions. A browser sends the token in the
address once, and the answer sets it as a cookie.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
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

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard is read-only", 405)
        method, path, guard = scope["method"], scope["path"], self._guard
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if guard.token and guard.is_token(query.pop("token", "")):
            # Remove the token from the address bar, so that shared links do not contain it.
            # A path that starts with two slashes would name another host.
            path = "/" + scope["path"].lstrip("/")
            to = path + (f"?{urlencode(query)}" if query else "")
            moved = RedirectResponse(to, 303)
            moved.set_cookie(COOKIE, guard.token, httponly=True, samesite="strict")
            return moved
        error = guard.find_refusal(method, path, headers, _read_cookie(headers))
        return None if error is None else PlainTextResponse(str(error), error.status)


def _read_cookie(headers: Headers) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""
