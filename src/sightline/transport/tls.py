"""TLS certificates of the servers, in the form that uvicorn and vLLM take."""

from __future__ import annotations

import ssl
import sys
from typing import Any

from sightline.errors import ConfigError
from sightline.transport.listen import is_loopback


def check_tls(cert: str, key: str, host: str) -> dict[str, Any]:
    """Return uvicorn's TLS options; warn if other machines reach `host` without a certificate."""
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
            open(path, "rb").close()
        except OSError as error:
            raise ConfigError(
                f"{setting} = {path!r}: {error.strerror}", "use a readable PEM file"
            ) from error
    try:
        # An empty password keeps it from asking at a terminal.
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
