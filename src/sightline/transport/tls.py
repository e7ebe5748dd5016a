"""TLS of our servers by certificate files, as uvicorn and vLLM take them."""

from __future__ import annotations

import ssl
import sys
from typing import Any

from sightline.errors import ConfigError
from sightline.transport.listen import is_loopback


def check_tls(cert: str, key: str, host: str) -> dict[str, Any]:
    """uvicorn's options for a server at `host`; none without a certificate, which is said where
    others than this machine can listen in."""
    if not cert and not key:
        if not is_loopback(host):
            print(
                f"what is sent to and from {host} is not encrypted: give --tls-cert and --tls-key, "
                "unless the network is private or a TLS proxy stands in front",
                file=sys.stderr,
            )
        return {}
    if not cert or not key:
        given, lacks = ("certificate", "key") if cert else ("key", "certificate")
        raise ConfigError(f"there is a TLS {given} and no {lacks}", "give tls_cert and tls_key")
    for setting, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ConfigError(
                f"{setting} = {path!r}: {error.strerror}", "name a PEM file that can be read"
            ) from error
    try:
        # Without a password nothing is asked for at a terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise ConfigError(
                f"the key in {key} is not that of the certificate in {cert}", "name its own key"
            ) from error
        raise ConfigError(
            f"no certificate and key can be read from {cert} and {key}: {error}",
            "name two PEM files: the certificate, followed by those between it and its authority, "
            "and its key, without a password",
        ) from error
    return {"ssl_certfile": cert, "ssl_keyfile": key}
