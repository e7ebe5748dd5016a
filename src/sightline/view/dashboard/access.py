"""Who may ask the dashboard, and what a browser may do with its answers.

Bound to loopback, anyone on this machine may ask, by a loopback name: a page of another site that
has its own name resolved to this machine may not. Bound elsewhere, a token is needed: the link
that `sightline view` prints holds it, and the first answer turns it into a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "sightline_token"
POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'",
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


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def make_token() -> str:
    return secrets.token_urlsafe(24)


class AccessMiddleware:
    """Refuses what must not be answered, and sets the headers of what may."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Without a token, only requests by a loopback name are answered."""
        self._app = app
        self._token = token

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
            return PlainTextResponse("the dashboard only reads", 405)
        if self._token is None:
            name = _parse_host(headers.get("host", ""))
            if not is_loopback(name):
                return PlainTextResponse("ask by the address of this machine: 127.0.0.1", 421)
            return None
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if self._is_token(query.pop("token", "")):
            # Out of the address bar, so that a link that is shared does not carry it.
            # Two slashes would begin the name of another host.
            path = "/" + scope["path"].lstrip("/")
            to = path + (f"?{urlencode(query)}" if query else "")
            moved = RedirectResponse(to, 303)
            moved.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return moved
        if self._is_token(_read_cookie(headers)) or self._is_token(_read_bearer(headers)):
            return None
        return PlainTextResponse("open the link that `sightline view` printed: it has a token", 401)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(), self._token.encode())


def _parse_host(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].strip("[")
    return host.partition(":")[0]


def _read_cookie(headers: Headers) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _read_bearer(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""
