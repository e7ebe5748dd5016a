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
from concurrent.futures import Future
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from sightline.errors import MediaError, MediaRefused

_PORTS = {"http": 80, "https": 443}
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

    A longer body is truncated to `max_bytes` plus one byte, so that a store refuses it.
    An allowed host is `name`, with the scheme's default port, or `name:port`. A private address is
    used only if the address itself is on the list.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError) as error:  # KeyError: no scheme
        problem = f"this is not a url: {url[:80]!r} ({error})"
        raise MediaRefused(problem, "write it as https://host/path") from error
    default_port = port == _PORTS[parts.scheme]
    names = {f"{host}:{port}", host} if default_port else {f"{host}:{port}"}
    if parts.username is not None or not names & set(allowed_hosts):
        raise MediaRefused(
            f"images from {parts.scheme}://{host}:{port} are not allowed",
            "send the image as a data: url, or add the host to [media] http_hosts",
        )
    deadline = time.monotonic() + timeout_s
    body: Future[bytes] = Future()
    connections: list[socket.socket] = []

    def download() -> None:
        try:
            address = _get_public_address(host, port, allowed_hosts, resolve)
            connection = socket.create_connection((address, port), _left_s(deadline))
            if parts.scheme == "https":
                # The certificate is checked against the host's name, not the address.
                context = ssl.create_default_context()
                connection = context.wrap_socket(connection, server_hostname=host)
            connections.append(connection)
            _left_s(deadline)
            body.set_result(_get_body(connection, parts, max_bytes))
        except BaseException as error:  # raised by `result`
            body.set_exception(error)

    # In a thread, because a lookup has no timeout, and a socket's restarts with every byte.
    threading.Thread(target=download, name=f"fetch from {host}", daemon=True).start()
    try:
        return body.result(timeout_s)
    except TimeoutError as error:
        problem = f"{host} did not deliver the image within {timeout_s} s"
        raise MediaRefused(problem, "send the image as a data: url") from error
    except MediaError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        problem = f"cannot fetch an image from {host}: {error}"
        raise MediaRefused(problem, "send the image as a data: url") from error
    finally:
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _left_s(deadline: float) -> float:
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


def _get_body(stream: socket.socket, parts: SplitResult, max_bytes: int) -> bytes:
    host = (parts.hostname or "").lower()
    connection = http.client.HTTPConnection(host, parts.port or _PORTS[parts.scheme])
    connection.sock = stream
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", target, headers={"Accept": "image/*"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise MediaRefused(
                    f"{host} answered {response.status} {response.reason}, not 200",
                    "use the final address of the image: redirects are not followed",
                )
            return response.read(max_bytes + 1)
    finally:
        connection.close()


def _get_public_address(
    host: str, port: int, allowed_hosts: Collection[str], resolve: HostResolver
) -> str:
    address = next(iter(resolve(host, port)), "")
    if not address:
        raise OSError("the host is unknown")
    is_listed = address in allowed_hosts or f"{address}:{port}" in allowed_hosts
    if not is_listed and not _is_public(address):
        raise MediaRefused(
            f"the host {host} has the private address {address}",
            f"add {address} itself to [media] http_hosts to allow it",
        )
    return address


def _is_public(address: str) -> bool:
    """Return whether an address, and any IPv4 address embedded in it, is public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if not ip.is_global or ip.is_multicast:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return True
    inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
    if inner is None and ip in _NAT64:
        inner = ipaddress.IPv4Address(ip.packed[-4:])
    return inner is None or _is_public(str(inner))
