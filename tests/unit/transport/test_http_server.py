"""Access control of HTTP servers: refused requests and closed connections. Real sockets."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sightline.errors import ConfigError
from sightline.transport.http_server import (
    DEFAULT_LIMITS,
    ConnectionLimits,
    GuardMiddleware,
    RequestGuard,
    build_uvicorn_config,
    check_address,
)
from sightline.transport.listen import bind_socket

JSON = {"content-type": "application/json"}
TOKEN = "a-token-of-some-length"
LONG_BYTES = 1 << 25
"""More than the kernel buffers for a client that does not read."""


def test_number_that_is_no_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no port 65536"):
        bind_socket("127.0.0.1", 65536)


@contextmanager
def serving(guard: RequestGuard, limits: ConnectionLimits = DEFAULT_LIMITS) -> Iterator[int]:
    async def answer(http: Request) -> PlainTextResponse:
        try:
            return PlainTextResponse(f"{len(await http.body())} bytes")
        except ClientDisconnect:
            return PlainTextResponse("gone", 499)

    async def long(http: Request) -> PlainTextResponse:
        return PlainTextResponse(bytes(LONG_BYTES))

    async def wait(http: Request) -> PlainTextResponse:
        await http.body()
        await http.receive()  # until it is gone
        return PlainTextResponse("gone", 499)

    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/", "/health")]
    routes += [Route("/long", long), Route("/wait", wait)]
    app = Starlette(routes=routes, middleware=[Middleware(GuardMiddleware, guard=guard)])
    listening = bind_socket("127.0.0.1", 0)
    running = uvicorn.Server(build_uvicorn_config(app, limits))
    thread = threading.Thread(target=lambda: running.run(sockets=[listening]))
    thread.start()
    while not running.started:
        time.sleep(0.005)
    try:
        yield listening.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join(20)
        listening.close()


def ask(port: int, method: str = "GET", path: str = "/", **headers: str) -> tuple[int, str]:
    """Return the status and, for a refusal, its type."""
    sent = {"host": f"127.0.0.1:{port}", "connection": "close"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    body = b"{}" if method == "POST" else b""
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in sent.items())]
    lines += [f"content-length: {len(body)}", "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        head, _, data = read_all(connection).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return status, "" if status == 200 else json.loads(data)["error"]["type"]


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


@pytest.fixture(scope="module")
def open_port() -> Iterator[int]:
    with serving(RequestGuard("127.0.0.1")) as port:
        yield port


@pytest.fixture(scope="module")
def locked_port() -> Iterator[int]:
    with serving(RequestGuard("127.0.0.1", TOKEN)) as port:
        yield port


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", "x"])
def test_foreign_host_name_is_refused(open_port: int, host: str) -> None:
    assert ask(open_port, host=host) == (421, "host")
    assert ask(open_port, path="/health", host=host) == (421, "host")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "LOCALHOST", "[::1]:8000"])
def test_loopback_names_are_answered(open_port: int, host: str) -> None:
    assert ask(open_port, host=host)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_origin_is_refused(open_port: int, origin: str) -> None:
    assert ask(open_port, "POST", origin=origin, content_type="application/json") == (403, "origin")
    assert ask(open_port, origin=origin) == (403, "origin")
    own = f"http://127.0.0.1:{open_port}"
    assert ask(open_port, "POST", origin=own, content_type="application/json")[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_post_requires_json(open_port: int, kind: str | None) -> None:
    """Content types that a page can post without a preflight request are refused."""
    headers = {} if kind is None else {"content_type": kind}
    assert ask(open_port, "POST", **headers) == (415, "content_type")
    assert ask(open_port, "POST", content_type="application/json; charset=utf-8")[0] == 200


def test_every_path_except_health_requires_a_token(locked_port: int) -> None:
    for wrong in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": TOKEN}):
        assert ask(locked_port, **wrong) == (401, "unauthorized")
        assert ask(locked_port, "POST", **wrong, content_type="application/json")[0] == 401
    assert ask(locked_port, authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(locked_port, path="/health")[0] == 200
    assert ask(locked_port, path="/health", host="evil.example")[0] == 421
    # A correct token does not help a page whose own name resolves to this machine.
    assert ask(locked_port, authorization=f"Bearer {TOKEN}", host="evil.example")[0] == 421


def test_server_off_loopback_accepts_any_host_name() -> None:
    guard = RequestGuard("0.0.0.0", TOKEN)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert guard.find_refusal("GET", "/", {"host": "service:80", **bearer}) is None
    refused = guard.find_refusal("GET", "/health", {"host": "service:80"})
    assert refused is not None and refused.status == 421
    assert guard.find_refusal("GET", "/health", {"host": "10.0.0.7:80"}) is None
    assert TOKEN not in repr(guard)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "machine.example"])
def test_server_without_a_token_listens_only_on_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match="no token") as refused:
        check_address(host, "", "--token")
    assert "--token env:NAME" in refused.value.fix
    check_address(host, "env:SIGHTLINE_TOKEN", "--token")
    check_address("127.0.0.1", "", "--token")


QUICK = ConnectionLimits(
    max_head_bytes=4096, head_s=0.3, body_s=0.9, unread_s=0.5, max_connections=4
)
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def quick_port() -> Iterator[int]:
    with serving(RequestGuard("127.0.0.1"), QUICK) as port:
        yield port


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HT", HEAD, b"\r\n\r\n\r\n", HEAD + b"content-length: 10\r\n\r\n123"],
    ids=["nothing", "a line", "headers", "empty lines", "a body"],
)
def test_incomplete_request_closes_its_connection(quick_port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        connection.sendall(sent)
        assert b" 408 " in read_all(connection)


@pytest.mark.parametrize("start", [HEAD, HEAD + b"content-length: 1000\r\n\r\n"])
def test_slowly_sent_request_closes_its_connection(quick_port: int, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        connection.sendall(start)
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 20:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 20


def test_endless_header_is_refused(quick_port: int) -> None:
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        connection.sendall(HEAD + b"x: " + b"y" * 5000)
        assert b" 431 " in read_all(connection)


@pytest.mark.parametrize("num_headers", [100, 2000])
def test_short_headers_count_towards_the_limit(quick_port: int, num_headers: int) -> None:
    """The whole head arrives in one piece, and each header is far below the limit."""
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        connection.sendall(HEAD + b"a:b\r\n" * num_headers + b"connection: close\r\n\r\n")
        status = b" 431 " if num_headers == 2000 else b" 200 "
        assert status in read_all(connection).partition(b"\r\n")[0]


def test_keep_alive_connection_has_the_same_limits(quick_port: int) -> None:
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        for _ in range(3):
            connection.sendall(HEAD + b"content-length: 2\r\n\r\n{}")
            data = b""
            while b"2 bytes" not in data:
                data += connection.recv(4096)
            time.sleep(0.5)  # idle for longer than a head may take: only its keep-alive ends it
        connection.sendall(b"POST")
        assert b" 408 " in read_all(connection)


@pytest.mark.parametrize("more", [b"", b"x: " + b"y" * 5000], ids=["slow", "long"])
def test_pipelined_request_has_the_same_limits(quick_port: int, more: bytes) -> None:
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
        time.sleep(0.1)  # in pieces of their own
        connection.sendall(HEAD + more)
        assert (b" 431 " if more else b" 408 ") in read_all(connection)


def ask_long(connection: socket.socket) -> None:
    connection.sendall(b"GET /long HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")


def test_unread_response_closes_its_connection(quick_port: int) -> None:
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        ask_long(connection)
        poll = select.poll()
        poll.register(connection, 0)  # its end alone
        assert poll.poll(30_000)
        with pytest.raises(ConnectionResetError):
            read_all(connection)


def test_slowly_read_response_arrives(quick_port: int) -> None:
    with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as connection:
        ask_long(connection)
        num_bytes = 0
        while piece := connection.recv(1 << 21, socket.MSG_WAITALL):
            num_bytes += len(piece)
            time.sleep(2.5 * QUICK.unread_s / (LONG_BYTES >> 21))
        assert num_bytes > LONG_BYTES


def test_connections_over_the_limit_get_503(quick_port: int) -> None:
    connections = [
        socket.create_connection(("127.0.0.1", quick_port), timeout=30) for _ in range(4)
    ]
    try:
        with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as late:
            late.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert b" 503 " in read_all(late)
    finally:
        for connection in connections:
            connection.close()
    deadline = time.monotonic() + 20
    while True:
        with socket.create_connection(("127.0.0.1", quick_port), timeout=30) as again:
            again.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            if b" 200 " in read_all(again):
                break
        assert time.monotonic() < deadline
