"""Where an HTTP server of ours listens, and the link under which it is found."""

from __future__ import annotations

import errno
import ipaddress
import socket

from sightline.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine can ask at `host`."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket, so that a taken port is known before anything else is done."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(kind, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise build_listen_error(host, port, error) from error
    return made


def build_listen_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen at {host}:{port}: {error.strerror or error}",
        choose_listen_fix(error),
    )


def choose_listen_fix(error: OSError) -> str:
    """What to do where an address cannot be bound."""
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "set host to an address of this machine, such as 127.0.0.1"
    if error.errno == errno.EACCES:
        return "set a port above 1023, or 0 to take a free one"
    return "stop what uses the port, or set 0 to take a free one"


def find_own_address(peer: str = "192.0.2.1") -> str:
    """The address of this machine from which `peer` is reached; loopback where none is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # nothing is sent; it says which way would be taken
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def describe_link(host: str, port: int, path: str = "", has_tls: bool = False) -> str:
    """A link that can be opened: for all interfaces that of this machine's own address, and a
    second line that says so."""
    is_open = host in ("0.0.0.0", "::")
    name = host
    if is_open:
        name = find_own_address()
    name = f"[{name}]" if ":" in name else name
    scheme = "https" if has_tls else "http"
    return f"{scheme}://{name}:{port}{path}" + f"\nlistening on all interfaces ({host})" * is_open
