"""Access control and connection limits of every HTTP server in Sightline.

A web page can make a browser post to this machine, or resolve its own name to it. So a request must
name the server by an address, come from the same origin, and post JSON, which a page cannot send
without a preflight request. A server with a token requires it too. The server limits the size and
duration of a request's head, the duration of its body, and the number of connections. It also
limits the time in which a client reads none of its response.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sightline.errors import ConfigError, EngineError
from sightline.transport.listen import is_ip_address, is_loopback

SAFE_METHODS = ("GET", "HEAD")
OPEN_PATHS = ("/health",)
"""Paths that need no token."""


def check_address(host: str, token: str, option: str) -> None:
    """Raise if other machines can reach `host` and there is no token."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"other machines can reach {host}, and the server has no token",
            f"set one with {option} env:NAME or file:PATH, or listen at 127.0.0.1",
        )


@dataclass(frozen=True)
class RequestGuard:
    """Refuses requests before they are processed."""

    host: str
    """The address that the server is bound to."""
    token: str = field(default="", repr=False)
    """Token that requests need. Empty for none."""
    control_token: str = field(default="", repr=False)
    """Token that control requests need. If empty, `token` is used."""
    is_control: Callable[[str, str], bool] = lambda method, path: False
    """Returns whether a method and path change the server's state."""

    def find_refusal(
        self, method: str, path: str, headers: Mapping[str, str], token: str = ""
    ) -> EngineError | None:
        """Return the reason to refuse a request, if any. `token` overrides the one in `headers`."""
        host, origin = headers.get("host", ""), headers.get("origin")
        credential = token or read_bearer(headers)
        is_known = bool(self.token) and self.is_token(credential)
        if self.token and not is_known and path not in OPEN_PATHS:
            return EngineError(
                "this server requires a token",
                "send it as `Authorization: Bearer TOKEN`",
                "unauthorized",
                401,
            )
        if (
            self.control_token
            and self.is_control(method, path)
            and not _is_same(credential, self.control_token)
        ):
            return EngineError(
                "this request requires the server's control token",
                "set [inference] or [media] control_token, as the run does",
                "control",
                403,
            )
        # At other addresses any host name may be valid, and a web page has no token.
        if (is_loopback(self.host) or not is_known) and not self._is_own_name(parse_host(host)):
            return EngineError(
                f"{parse_host(host)[:80]!r} is not a name of this server",
                f"use its address: {self.host}",
                "host",
                421,
            )
        if origin is not None and origin.partition("://")[2] != host:
            problem = f"pages of {origin[:80]!r} may not use this server"
            return EngineError(problem, "send the request without a browser", "origin", 403)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method not in (*SAFE_METHODS, "PUT", "DELETE") and kind != "application/json":
            problem = f"the content-type is {kind[:80]!r}"
            return EngineError(problem, "send JSON as application/json", "content_type", 415)
        return None

    def is_token(self, given: str) -> bool:
        """Return whether `given` is either token. The control token allows every request."""
        return _is_same(given, self.token) | _is_same(given, self.control_token or self.token)

    def _is_own_name(self, name: str) -> bool:
        is_here = is_loopback(name) if is_loopback(self.host) else is_ip_address(name)
        return is_here or name in ("localhost", self.host)


def _is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def read_bearer(headers: Mapping[str, str]) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


async def receive_body(http: Request, max_bytes: int, kind: str) -> list[bytes]:
    """Return the parts of the body. Raise an EngineError of `kind` as soon as it exceeds
    `max_bytes`. Large bodies should be joined in a thread."""
    fix = "send fewer or smaller images, a window of the history, or media: URLs of stored images"
    error = EngineError(f"the body exceeds {max_bytes} bytes", fix, kind, 413)
    declared_size = http.headers.get("content-length", "")
    if declared_size.isdigit() and int(declared_size) > max_bytes:
        raise error
    parts, num_bytes = [], 0
    async for part in http.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise error
        parts.append(part)
    return parts


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def parse_host(host: str) -> str:
    """Return the name in a Host header, without its port."""
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def encode_refusal(error: EngineError) -> bytes:
    body = {
        "message": error.problem,
        "type": error.kind,
        "code": error.status,
        "fix": error.fix,
    }
    return json.dumps({"error": body}).encode()


def respond_with_refusal(path: str, error: EngineError) -> Response:
    return Response(encode_refusal(error), error.status, media_type="application/json")


class GuardMiddleware:
    """Applies a guard to an ASGI application. `respond` returns the response to a refused request
    for a path."""

    def __init__(
        self,
        app: ASGIApp,
        guard: RequestGuard,
        respond: Callable[[str, EngineError], Response] = respond_with_refusal,
    ) -> None:
        self._app, self._guard, self._respond = app, guard, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
            error = self._guard.find_refusal(scope["method"], scope["path"], headers)
            if error is not None:
                return await self._respond(scope["path"], error)(scope, receive, send)
        await self._app(scope, receive, send)


@dataclass(frozen=True)
class ConnectionLimits:
    """Connection limits, as listed in docs/serving.md."""

    max_head_bytes: int = 1 << 16
    head_s: float = 30.0
    """Maximum time from a request's first byte, or its connection's start, to its head's end."""
    body_s: float = 120.0
    """Maximum time from the end of the head to the end of the body."""
    unread_s: float = 60.0
    """Maximum time in which a client reads none of its response. Also the check interval."""
    max_connections: int = 4096
    """Additional connections get a 503."""


DEFAULT_LIMITS = ConnectionLimits()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with timeouts for slow requests and unread answers."""

    def __init__(
        self, *args: Any, limits: ConnectionLimits = DEFAULT_LIMITS, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.limit_concurrency = limits.max_connections
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._is_head = True
        self._num_head_bytes = 0
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Pause writing while anything is unread. TLS pauses at `high` bytes, plain TCP above it.
        has_tls = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=1 if has_tls else 0, low=0)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread(0)

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def _watch_unread(self, num_before: int) -> None:
        """Abort the connection if the number of unread bytes is the same as at the last check."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread == num_before:
            # With a reset, so that the kernel frees its buffers at once.
            kernel_socket = self.transport.get_extra_info("socket")
            kernel_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._unread_timer = self.loop.call_later(
                self._limits.unread_s, self._watch_unread, num_unread
            )

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def data_received(self, data: bytes) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # the next request of a kept connection
        super().data_received(data)
        if self._timer is not None and self._is_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        if self._timer is None:
            self._await_head()  # pipelined after an unanswered request
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        # `data_received` has not counted a head that ends in its first piece. 4: ": " and "\r\n".
        sizes = [len(name) + len(value) + 4 for name, value in self.headers]
        if len(self.url) + sum(sizes) > self._limits.max_head_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            raise ValueError("the head is too large")  # ends the parsing
        self._is_head = False
        self._start_timer(self._limits.body_s)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def _await_head(self) -> None:
        self._is_head, self._num_head_bytes = True, 0
        self._start_timer(self._limits.head_s)

    def _start_timer(self, limit_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(limit_s, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: HTTPStatus) -> None:
        """Close the connection, with an error if no response has started."""
        self._stop_timer()
        is_answered = self.cycle is not None and self.cycle.response_started
        if not self.transport.is_closing() and (self._is_head or not is_answered):
            limits = self._limits
            problem = (
                f"the limits are {limits.head_s:g} s and {limits.max_head_bytes} bytes for the "
                f"head, and {limits.body_s:g} s for the body"
            )
            error = EngineError(problem, "send the request at once", "unfinished", int(status))
            body = encode_refusal(error)
            head = f"HTTP/1.1 {int(status)} {status.phrase}\r\ncontent-type: application/json\r\n"
            head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def build_uvicorn_config(
    app: Any, limits: ConnectionLimits = DEFAULT_LIMITS, **options: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration with our connection limits. `options` are uvicorn's."""
    config: dict[str, Any] = {"access_log": False, "log_level": "warning", "server_header": False}
    config |= {"http": partial(LimitedProtocol, limits=limits), "ws": "none", **options}
    return uvicorn.Config(app, **config)


class LoopServer(uvicorn.Server):
    """Serves an application on the running event loop, without signals, lifespan or a thread."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(build_uvicorn_config(app, limits, lifespan="off", **options))

    async def start(self, listening: socket.socket) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[listening])
