"""Download an image from a host on the allow-list.

Redirects are not followed and proxies are not used: both could lead to a host that is not allowed.
The host's name is looked up once, and the connection goes to the address that was checked.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from urllib.parse import urlsplit

from sightline.errors import MediaRefused

_PORTS = {"http": 80, "https": 443}
_LEAST_S = 0.001
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

HostResolver = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host and port, of which the first is used. Raises OSError."""


def resolve_host(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def fetch(
    url: str,
    allowed_hosts: Collection[str],
    max_bytes: int,
    timeout_s: float,
    resolve: HostResolver = resolve_host,
) -> bytes:
    """Return the body at `url`, or raise `MediaRefused`.

    A body above `max_bytes` is cut after one byte more, so that a store refuses it as too large.
    An allowed host is `name`, with the scheme's default port, or `name:port`. A private address is
    used only if the address itself is on the list.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError) as error:  # KeyError: no scheme
        raise MediaRefused(
            f"not a url: {url[:80]!r} ({error})", "write it as https://host/path"
        ) from error
    default_port = port == _PORTS[parts.scheme]
    names = {f"{host}:{port}", host} if default_port else {f"{host}:{port}"}
    if parts.username is not None or not names & set(allowed_hosts):
        raise MediaRefused(
            f"images from {parts.scheme}://{host}:{port} are not allowed",
            "send the image as a data: url, or add the host to [media] http_hosts",
        )
    deadline = time.monotonic() + timeout_s
    address = _get_public_address(host, port, allowed_hosts, resolve, timeout_s)
    connection = http.client.HTTPConnection(host, port)
    watchdog: threading.Timer | None = None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        wire = socket.create_connection((address, port), _left_s(deadline))
        if parts.scheme == "https":
            # The certificate is checked against the host's name, not the address.
            wire = ssl.create_default_context().wrap_socket(wire, server_hostname=host)
        connection.sock = wire
        # A socket's timeout restarts with every byte; this one covers the whole exchange.
        watchdog = threading.Timer(_left_s(deadline), _shut_down, [wire])
        watchdog.daemon = True
        watchdog.start()
        connection.request("GET", target, headers={"Accept": "image/*"})
        with connection.getresponse() as response:
            body = response.read(max_bytes + 1) if response.status == 200 else b""
        is_late = time.monotonic() >= deadline
    except (OSError, http.client.HTTPException, ValueError) as error:
        what = str(error)
        if time.monotonic() >= deadline:
            what = f"no answer within {timeout_s} s"
        raise MediaRefused(
            f"cannot fetch an image from {host}: {what}", "send the image as a data: url"
        ) from error
    finally:
        if watchdog is not None:
            watchdog.cancel()
        connection.close()
    if is_late:
        raise MediaRefused(
            f"{host} did not deliver the image within {timeout_s} s",
            "send the image as a data: url, or raise the time limit",
        )
    if response.status != 200:
        raise MediaRefused(
            f"{host} answered {response.status} {response.reason}, not 200",
            "use the final address of the image: redirects are not followed",
        )
    return body


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), _LEAST_S)


def _shut_down(wire: socket.socket) -> None:
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)


def _get_public_address(
    host: str,
    port: int,
    allowed_hosts: Collection[str],
    resolve: HostResolver = resolve_host,
    timeout_s: float | None = None,
) -> str:
    lookup = _start_lookup(host, port, resolve)
    if not wait([lookup], timeout_s).done:
        raise MediaRefused(
            f"looking up {host} took more than {timeout_s} s",
            "send the image as a data: url, or check this machine's name server",
        )
    try:
        address = next(iter(lookup.result()))
    except (OSError, UnicodeError, StopIteration) as error:
        raise MediaRefused(f"unknown host {host}: {error}", "check its name") from error
    is_listed = address in allowed_hosts or f"{address}:{port}" in allowed_hosts
    if not is_listed and not _is_public(address):
        raise MediaRefused(
            f"the host {host} has the private address {address}",
            f"add {address} itself to [media] http_hosts to allow it",
        )
    return address


def _start_lookup(host: str, port: int, resolve: HostResolver) -> Future[Sequence[str]]:
    """Look a host up in a thread: the system's lookup has no timeout."""
    lookup: Future[Sequence[str]] = Future()

    def look_up() -> None:
        try:
            lookup.set_result(resolve(host, port))
        except BaseException as error:  # raised by `result`
            lookup.set_exception(error)

    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    return lookup


def _is_public(address: str) -> bool:
    """Return whether an address, and the one that it may wrap, is public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if not ip.is_global or ip.is_multicast:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return True
    inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
    if inner is None and ip in _NAT64:
        inner = ipaddress.IPv4Address(ip.packed[-4:])
    return inner is None or _is_public(str(inner))
