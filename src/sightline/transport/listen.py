"""Addresses that servers listen at, links to them, and TLS certificates."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import socket
import ssl
import sys
from typing import Any

from sightline.errors import ConfigError
from sightline.regular_file import check_file


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bind_socket(host: str, port: int, setting: str = "") -> socket.socket:
    """Return a bound socket. Raise if the port is in use. Errors name the port's `setting`."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{setting or 'port'} = {port} is not a port", "use 0 to 65535")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(kind, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise build_listen_error(host, port, error, setting) from error
    return listening


def build_listen_error(host: str, port: int, error: OSError, setting: str = "") -> ConfigError:
    fix = "stop the process that uses the port, or set 0 for a free one"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        fix = "set host to an address of this machine, such as 127.0.0.1"
    elif error.errno == errno.EACCES:
        fix = "set a port above 1023, or 0 for a free one"
    where = f"{setting} = {port}: " if setting else ""
    return ConfigError(f"{where}cannot listen at {host}:{port}: {error.strerror or error}", fix)


def find_own_address(peer: str = "192.0.2.1") -> str:
    """Return this machine's address on the route to `peer`, or loopback if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # sends nothing, but chooses a route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def describe_link(host: str, port: int, path: str = "", has_tls: bool = False) -> str:
    """Return a link to a server. For all interfaces, use this machine's address and say so."""
    is_open = host in ("0.0.0.0", "::")
    name = find_own_address() if is_open else host
    name = f"[{name}]" if ":" in name else name
    scheme = "https" if has_tls else "http"
    return f"{scheme}://{name}:{port}{path}" + f"\nlistening on all interfaces ({host})" * is_open


def add_listen_options(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options of a command that serves other machines."""
    bind, default = parser.add_argument, "default: %(default)s"
    bind("--host", default="127.0.0.1", help=f"address to bind to; {default}")
    bind("--port", type=int, default=port, help=f"port; 0 chooses a free one; {default}")
    bind("--tls-cert", default="", metavar="FILE", help="PEM file of the TLS certificate")
    bind("--tls-key", default="", metavar="FILE", help="PEM file of its private key")


def check_tls(cert: str, key: str, host: str) -> dict[str, Any]:
    """Return uvicorn's TLS options. Warn if other machines reach `host` without a certificate."""
    if not cert and not key:
        if not is_loopback(host):
            print(
                f"connections to {host} are not encrypted: pass --tls-cert and --tls-key, unless "
                "the network is private or a TLS proxy is in front",
                file=sys.stderr,
            )
        return {}
    if not cert or not key:
        given, lacks = ("certificate", "key") if cert else ("key", "certificate")
        raise ConfigError(f"there is a TLS {given} but no {lacks}", "set tls_cert and tls_key")
    for setting, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            check_file(path)
        except OSError as error:
            raise ConfigError(
                f"{setting} = {path!r}: {error.strerror}", "use a readable PEM file"
            ) from error
    try:
        # An empty password prevents a prompt at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise ConfigError(
                f"the key in {key} does not match the certificate in {cert}", "use its own key"
            ) from error
        raise ConfigError(
            f"{cert} and {key} do not contain a certificate and a key: {error}",
            "use two PEM files: the certificate with its chain, and its key without a password",
        ) from error
    return {"ssl_certfile": cert, "ssl_keyfile": key}
