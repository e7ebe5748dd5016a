"""HTTP client of a media service (`sightline media serve`).

GET, HEAD, PUT /media/DIGEST      the bytes of an image
POST /media/DIGEST/renew          renew the image's last use
GET  /media                       every digest with its size, as JSON
PUT, DELETE /leases/NAME          a run's lease
POST /gc                          remove unused images

With a worker's token (`derive_worker_token`), every image that it has not put is missing.

The same routes below /blobs are for parts of files: any bytes, which DELETE removes. If the service
has a control token, every removal requires it, and so does everything below /blobs except reading
a known digest.
"""

from __future__ import annotations

import hmac
import http.client
import ssl
import weakref
from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec

from sightline.errors import CERTIFICATE_FIX, MediaCorrupt, MediaError, StoreFull
from sightline.media import files
from sightline.media.remote import Unavailable, retry

MISSING, TOO_SLOW, TOO_MANY, FULL = 404, 408, 429, 507
_KINDS = {"media_corrupt": MediaCorrupt, "store_full": StoreFull}
_GC_TIMEOUT_S = 3600.0
_NUM_SHOWN = 200
_NO_SERVICE = (404, 405, 501)
_NO_SERVICE_FIX = (
    "check host and port in [media] root (or --store): `sightline media serve` prints its address"
)


def derive_worker_token(token: str, name: str) -> str:
    """Return a token of the service for one worker, which reads only the images that it has put.
    It does not reveal the service's `token`."""
    digest = hmac.digest(token.encode(), f"sightline:media:{name}".encode(), "sha256")
    return f"{name}.{digest.hex()}"


class GcRequest(msgspec.Struct, forbid_unknown_fields=True):
    in_use: list[str]
    min_age_s: float
    dry_run: bool = False


class HttpRemote:
    """A media service as a remote. Reuses connections. Thread-safe."""

    def __init__(
        self, address: str, token: str, max_bytes: int, timeout_s: float, deadline_s: float
    ) -> None:
        parts = urlsplit(address)
        if parts.username or parts.query or not parts.hostname:
            raise MediaError(
                f"{parts.scheme}://{parts.hostname} is not the address of a media service",
                "write http://HOST:PORT, and set [media] token to env:NAME or file:PATH",
            )
        self.address, self._parts = address, parts
        self._token, self._max_bytes = token, max_bytes
        self._timeout_s, self.deadline_s = timeout_s, deadline_s
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._kept: list[http.client.HTTPConnection] = []
        weakref.finalize(self, _close_all, self._kept)

    def read(self, digest: str) -> bytes | None:
        status, body = self._request("GET", f"/media/{digest}", ok=(200, MISSING))
        return body if status == 200 else None

    def write(self, digest: str, data: bytes) -> bool:
        status, _ = self._request("PUT", f"/media/{digest}", data, "application/octet-stream")
        return status == 201

    def has(self, digest: str) -> bool:
        return self._request("HEAD", f"/media/{digest}", ok=(200, MISSING))[0] == 200

    def renew(self, digest: str) -> bool:
        return self._request("POST", f"/media/{digest}/renew", ok=(200, MISSING))[0] == 200

    def remove(self, digest: str) -> None:
        self._request("DELETE", f"/media/{digest}")

    def list_sizes(self) -> list[tuple[str, int]]:
        _, body = self._request("GET", "/media", max_bytes=1 << 40)
        try:
            return msgspec.json.decode(body, type=list[tuple[str, int]])
        except msgspec.DecodeError as error:
            problem = f"{self.address} is not a media service: it lists no images at /media"
            raise MediaError(problem, _NO_SERVICE_FIX) from error

    def renew_lease(self, name: str) -> None:
        self._request("PUT", f"/leases/{name}")

    def end_lease(self, name: str) -> None:
        self._request("DELETE", f"/leases/{name}")

    def gc(self, in_use: Collection[str], min_age_s: float, dry_run: bool) -> files.GcReport:
        body = msgspec.json.encode(GcRequest(list(in_use), min_age_s, dry_run))

        def collect() -> bytes:
            return self._request("POST", "/gc", body, timeout_s=_GC_TIMEOUT_S, max_bytes=1 << 40)[1]

        report = retry(collect, self.address, self.deadline_s)
        return msgspec.json.decode(report, type=files.GcReport)

    def check_writable(self) -> None:
        self._request("POST", "/check")

    def _request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = "application/json",
        ok: tuple[int, ...] = (200, 201),
        timeout_s: float | None = None,
        max_bytes: int | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and body of a response. Raise unless the status is in `ok`."""
        headers = {"content-type": kind}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        timeout_s = timeout_s or self._timeout_s
        connection, limit = self._take_connection(), max_bytes or max(self._max_bytes, 1 << 16)
        while True:
            is_kept = connection.sock is not None
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            try:
                connection.request(method, self._parts.path + path, body or None, headers)
                with connection.getresponse() as answer:
                    data, status = answer.read(limit + 1), answer.status
                    num_lacking, is_over = answer.length or 0, answer.isclosed()
                break
            except ssl.SSLCertVerificationError as error:
                problem = f"the certificate of {self.address} is not trusted: {error}"
                raise MediaError(problem, CERTIFICATE_FIX) from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The service may have closed a kept-alive connection.
                if not is_kept or isinstance(error, TimeoutError):
                    problem = f"{method} {path[:24]}: {type(error).__name__} {error}"
                    raise Unavailable(problem) from error
            except BaseException:
                connection.close()
                raise
        if num_lacking or not is_over:
            connection.close()
        self._kept.append(connection)
        if len(data) > limit:
            problem = f"{self.address} answered {method} {path[:24]} with more than {limit} bytes"
            raise MediaError(problem, _NO_SERVICE_FIX)
        if num_lacking:
            raise Unavailable(f"{method} {path[:24]}: {num_lacking} bytes of the body are missing")
        if status in ok:
            return status, data
        if status in _NO_SERVICE and method != "DELETE" and not _read_refusal(data):
            problem = f"{self.address} is not a media service: it answered {status} to {method} "
            raise MediaError(problem + path[:24], _NO_SERVICE_FIX)
        raise self._build_error(status, data)

    def _take_connection(self) -> http.client.HTTPConnection:
        try:
            return self._kept.pop()
        except IndexError:
            host, port = self._parts.hostname or "", self._parts.port
            if self._tls is None:
                return http.client.HTTPConnection(host, port)
            return http.client.HTTPSConnection(host, port, context=self._tls)

    def _build_error(self, status: int, data: bytes) -> Exception:
        problem, fix, kind = data[:_NUM_SHOWN].decode(errors="replace"), "see the service's log", ""
        if refusal := _read_refusal(data):
            problem, fix, kind = refusal
        if status in (TOO_SLOW, TOO_MANY) or (status >= 500 and status != FULL):
            return Unavailable(f"{status} {problem}")
        if status in (401, 403):
            name = "token" if status == 401 else "control_token"
            problem = f"it requires its {name}"
            if self._token:
                problem = f"the token is not its {name}"
            fix = (
                f"set [media] {name} (or --token) to env:NAME or file:PATH of the service's {name}"
            )
        return _KINDS.get(kind, MediaError)(f"{self.address} answered {status}: {problem}", fix)


def _read_refusal(data: bytes) -> tuple[str, str, str] | None:
    """Return the problem, fix and type of a media service's error; None for any other body."""
    try:
        error = msgspec.json.decode(data)["error"]
        return str(error["message"]), str(error["fix"]), str(error["type"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()
