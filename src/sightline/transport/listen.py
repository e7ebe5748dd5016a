"""Addresses that servers listen at, and links to them."""

from __future__ import annotations

import errno
import ipaddress
import socket

from sightline.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a port in use is known before anything else happens."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(kind, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise build_listen_error(host, port, error) from error
    return listening


def build_listen_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen at {host}:{port}: {error.strerror or error}",
        choose_listen_fix(error),
    )


def choose_listen_fix(error: OSError) -> str:
    """Return how to fix an address that cannot be bound."""
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "set host to an address of this machine, such as 127.0.0.1"
    if error.errno == errno.EACCES:
        return "set a port above 1023, or 0 for a free one"
    return "stop the process that uses the port, or set 0 for a free one"


def find_own_address(peer: str = "192.0.2.1") -> str:
    """Return this machine's address on the route to `peer`; loopback if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # sends nothing; it only chooses a route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def describe_link(host: str, port: int, path: str = "", has_tls: bool = False) -> str:
    """Return a link to a server. For all interfaces, use this machine's address and say so."""
    is_open = host in ("0.0.0.0", "::")
    name = host
    if is_open:
        name = find_own_address()
    name = f"[{name}]" if ":" in name else name
    scheme = "https" if has_tls else "http"
    return f"{scheme}://{name}:{port}{path}" + f"\nlistening on all interfaces ({host})" * is_open
