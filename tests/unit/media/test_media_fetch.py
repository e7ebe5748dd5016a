"""Ingest refuses a url before it connects. A test resolver looks names up,
and every connection of the process is watched."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from sightline.errors import MediaRefused
from sightline.media import ImageIngestor, MediaStore

Picture = Callable[..., Image.Image]
Encode = Callable[..., bytes]
WHERE = "messages[0].content[0].image_url.url"
PUBLIC = "93.184.216.34"


class Resolver:
    """Return the next answer to each question, and repeat the last one."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record addresses that were connected to. No connection leaves this machine."""
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
def test_allowed_host_at_a_private_address_is_refused_before_connect(
    store: MediaStore, connections: list[Any], address: str
) -> None:
    resolver = Resolver([address])
    ingest = ImageIngestor(store, http_hosts=["pictures.example"], resolve=resolver)
    for scheme, port in (("http", 80), ("https", 443)):
        assert "private address" in refused(ingest, f"{scheme}://pictures.example/a.png")
        assert resolver.asked[-1] == ("pictures.example", port)
    assert connections == []


def test_unlisted_host_is_not_resolved(store: MediaStore, connections: list[Any]) -> None:
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


def test_host_is_resolved_once_and_the_checked_address_is_used(
    store: MediaStore, connections: list[Any]
) -> None:
    """A name that changes its address between check and connection is not fetched."""
    resolver = Resolver([PUBLIC, "127.0.0.1"], ["127.0.0.1"])
    ingest = ImageIngestor(store, http_hosts=["rebinding.example"], resolve=resolver)
    assert "cannot fetch an image" in refused(ingest, "http://rebinding.example/a.png")
    assert len(resolver.asked) == 1
    assert [tried[0] for tried in connections] == [PUBLIC]
    # The second lookup gives a private address. It is refused, and the first answer is not cached.
    assert "private address 127.0.0.1" in refused(ingest, "http://rebinding.example/a.png")
    assert len(connections) == 1


def test_unresolvable_host_is_refused(store: MediaStore, connections: list[Any]) -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolver in (unknown, Resolver([])):
        ingest = ImageIngestor(store, http_hosts=["gone.example"], resolve=resolver)
        assert "cannot fetch an image from gone.example" in refused(
            ingest, "http://gone.example/a.png"
        )
    assert connections == []


def test_slow_dns_lookup_times_out(store: MediaStore, connections: list[Any]) -> None:
    may_answer, is_answered = threading.Event(), threading.Event()

    def slow(host: str, port: int) -> list[str]:
        may_answer.wait()
        is_answered.set()
        return [PUBLIC]

    ingest = ImageIngestor(store, http_hosts=["slow.example"], timeout_s=0.05, resolve=slow)
    assert "within 0.05 s" in refused(ingest, "http://slow.example/a.png")
    may_answer.set()
    assert is_answered.wait(30) and connections == [], "an answer that comes too late is not used"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(
    store: MediaStore, connections: list[Any], server: int, status: int
) -> None:
    resolver = Resolver(["127.0.0.1"])
    allowed = [f"127.0.0.1:{server}", "pictures.example"]
    ingest = ImageIngestor(store, http_hosts=allowed, resolve=resolver)
    for target in (
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/a.png",
        "http://localhost/a.png",
        "http://pictures.example/a.png",
        "file:///etc/passwd",
        "//10.0.0.1/a.png",
    ):
        url = f"http://127.0.0.1:{server}/{status}/{target}"
        assert f"{status}" in refused(ingest, url)
    assert {tried[:2] for tried in connections} == {("127.0.0.1", server)}
    assert {host for host, _ in resolver.asked} == {"127.0.0.1"}


def test_proxy_environment_variables_are_ignored(
    store: MediaStore, connections: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    ingest = ImageIngestor(store, http_hosts=["pictures.example"], resolve=Resolver([PUBLIC]))
    refused(ingest, "http://pictures.example/a.png")
    assert [tried[0] for tried in connections] == [PUBLIC]
