"""Ingest refuses a url before it connects. A test resolver looks names up,
and every connection of the process is watched."""

from __future__ import annotations

import base64
import socket
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from sightline.errors import MediaError, MediaRefused
from sightline.media import ImageIngestor, MediaStore

Picture = Callable[..., Image.Image]
Encode = Callable[..., bytes]
WHERE = "messages[0].content[0].image_url.url"
PUBLIC = "93.184.216.34"


class Resolver:
    """Return the next answer to each question, and the last one again at the end."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Addresses that were connected to; no connection leaves this machine."""
    tried: list[tuple[Any, ...]] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        tried.append(address)
        if not str(address[0]).startswith("127."):
            raise ConnectionRefusedError("a test connects to this machine only")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    return tried


def refused(ingest: ImageIngestor, url: str) -> str:
    with pytest.raises(MediaRefused) as caught:
        ingest.resolve(url, WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    return str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.5", "172.16.0.1", "192.168.1.1", "127.0.0.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "::1", "::", "fe80::1%eth0",
        "fc00::1", "ff02::1", "::ffff:10.0.0.5", "::ffff:127.0.0.1", "2002:7f00:1::",
        "64:ff9b::10.0.0.5", "64:ff9b::7f00:1",
    ],
)  # fmt: skip
def test_an_allowed_name_at_a_private_address_is_refused_before_connect(
    store: MediaStore, connections: list[Any], address: str
) -> None:
    resolver = Resolver([address])
    ingest = ImageIngestor(store, http_hosts=["pictures.example"], resolve=resolver)
    for scheme, port in (("http", 80), ("https", 443)):
        assert "private address" in refused(ingest, f"{scheme}://pictures.example/a.png")
        assert resolver.asked[-1] == ("pictures.example", port)
    assert connections == []


def test_a_host_that_is_not_on_the_list_is_not_even_looked_up(
    store: MediaStore, connections: list[Any]
) -> None:
    resolver = Resolver([PUBLIC])
    ingest = ImageIngestor(store, http_hosts=["pictures.example"], resolve=resolver)
    for url in (
        "http://evil.example/a.png",
        "http://pictures.example.evil.example/a.png",
        "http://pictures.example@evil.example/a.png",
        "http://pictures.example:8080/a.png",
        "http://2130706433/a.png",
        "http://0x7f000001/a.png",
        "http://[::1]/a.png",
        "http://169.254.169.254/latest/meta-data",
        "https://PICTURES.example:444/a.png",
    ):
        assert "not allowed" in refused(ingest, url)
    assert resolver.asked == [] and connections == []


def test_a_name_is_looked_up_once_and_the_address_that_was_checked_is_used(
    store: MediaStore, connections: list[Any]
) -> None:
    """A name that changes its answer between the check and the connection gains nothing."""
    resolver = Resolver([PUBLIC, "127.0.0.1"], ["127.0.0.1"])
    ingest = ImageIngestor(store, http_hosts=["rebinding.example"], resolve=resolver)
    assert "cannot fetch an image" in refused(ingest, "http://rebinding.example/a.png")
    assert len(resolver.asked) == 1
    assert [tried[0] for tried in connections] == [PUBLIC]
    # Asked again, the name now leads inside: refused, and nothing was kept of the first answer.
    assert "private address 127.0.0.1" in refused(ingest, "http://rebinding.example/a.png")
    assert len(connections) == 1


def test_a_name_that_nobody_knows_is_refused(store: MediaStore, connections: list[Any]) -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolver in (unknown, Resolver([])):
        ingest = ImageIngestor(store, http_hosts=["gone.example"], resolve=resolver)
        assert "cannot fetch an image from gone.example" in refused(
            ingest, "http://gone.example/a.png"
        )
    assert connections == []


def test_a_lookup_that_takes_too_long_is_given_up(
    store: MediaStore, connections: list[Any]
) -> None:
    may_answer, answered = threading.Event(), threading.Event()

    def slow(host: str, port: int) -> list[str]:
        may_answer.wait()
        answered.set()
        return [PUBLIC]

    ingest = ImageIngestor(store, http_hosts=["slow.example"], timeout_s=0.05, resolve=slow)
    assert "within 0.05 s" in refused(ingest, "http://slow.example/a.png")
    may_answer.set()
    assert answered.wait(30) and connections == [], "an answer that comes too late is not used"


@pytest.fixture
def redirecting() -> Iterator[int]:
    """A server on this machine that sends everybody to the path that was asked for, as a url."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, _, target = self.path[1:].partition("/")
            self.send_response(int(status))
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_wherever_it_leads(
    store: MediaStore, connections: list[Any], redirecting: int, status: int
) -> None:
    resolver = Resolver(["127.0.0.1"])
    allowed = [f"127.0.0.1:{redirecting}", "pictures.example"]
    ingest = ImageIngestor(store, http_hosts=allowed, resolve=resolver)
    for target in (
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/a.png",
        "http://localhost/a.png",
        "http://pictures.example/a.png",
        "file:///etc/passwd",
        "//10.0.0.1/a.png",
    ):
        url = f"http://127.0.0.1:{redirecting}/{status}/{target}"
        assert f"{status}" in refused(ingest, url)
    assert {tried[:2] for tried in connections} == {("127.0.0.1", redirecting)}
    assert {host for host, _ in resolver.asked} == {"127.0.0.1"}


def test_the_proxies_of_the_environment_are_not_used(
    store: MediaStore, connections: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    ingest = ImageIngestor(store, http_hosts=["pictures.example"], resolve=Resolver([PUBLIC]))
    refused(ingest, "http://pictures.example/a.png")
    assert [tried[0] for tried in connections] == [PUBLIC]


# --- bytes that lie


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png(width: int, height: int, *extra: bytes, pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", header),
            *extra,
            png_chunk(b"IDAT", pixels),
            png_chunk(b"IEND", b""),
        ]
    )


def bombs(picture: Picture, encode: Encode) -> dict[str, bytes]:
    """Small files that say, or become, far more than a picture may be."""
    jpeg = bytearray(encode(picture(), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    gif = bytearray(encode(picture(), "GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    webp = bytearray(encode(picture(), "WEBP"))
    webp[26:30] = b"\xff\x3f\xff\x3f"
    zeros = zlib.compress(bytes(1 << 20), 9)
    return {
        "png": png(30_000, 30_000, pixels=zeros),
        "png_side": png(1 << 30, 1, pixels=zeros),
        "jpeg": bytes(jpeg),
        "gif": bytes(gif),
        "webp": bytes(webp),
    }


def test_a_picture_that_says_it_is_huge_is_refused_before_a_pixel_is_made(
    store: MediaStore, picture: Picture, encode: Encode
) -> None:
    ingest = ImageIngestor(store)
    for name, data in bombs(picture, encode).items():
        url = data_url(data)
        tracemalloc.start()
        said = refused(ingest, url)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert "limit" in said, name
        assert peak < 20 * len(url) + (1 << 20), name
    assert store.count() == 0


def test_what_inflates_behind_an_honest_header_costs_no_more_than_the_header_says(
    store: MediaStore,
) -> None:
    much = zlib.compress(bytes(64 << 20), 9)
    honest = zlib.compress(b"\0" * (8 * (1 + 8 * 3)), 9)
    for data in (
        png(8, 8, pixels=much),
        png(8, 8, png_chunk(b"zTXt", b"a\0\0" + much), pixels=honest),
        png(8, 8, png_chunk(b"iCCP", b"a\0\0" + much), pixels=honest),
    ):
        tracemalloc.start()
        try:
            picture = store.image(ImageIngestor(store).resolve(data_url(data), WHERE))
            assert picture.size == (8, 8)
        except MediaError as error:
            assert error.fix
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 24 << 20
