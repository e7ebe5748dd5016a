"""Puts a file to an address: a presigned url, or any object store that takes PUT."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from sightline.errors import ConfigError, UploadFailed

CHUNK_BYTES = 1 << 20
MAX_ATTEMPTS = 5
TIMEOUT_S = 60.0
RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
"""Answers that may heal."""


def build_upload_url(url: str, name: str) -> str:
    """The address of a file: `url` itself, or below it where it ends in a slash."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"cannot upload to {url}", "give an http or https address")
    return url + quote(name) if parts.path.endswith("/") and not parts.query else url


def upload(
    path: Path,
    url: str,
    headers: Mapping[str, str] | None = None,
    tries: int = MAX_ATTEMPTS,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Sends the file with its length, a chunk at a time; each new try begins at its start."""
    problem = ""
    with open(path, "rb") as file:
        size = path.stat().st_size
        for attempt in range(tries):
            if attempt:
                wait(min(30.0, 0.5 * 2**attempt))
            file.seek(0)
            status, problem = _send_once(file, size, url, headers or {})
            if 200 <= status < 300:
                return
            if status and status not in RETRY_STATUSES:
                raise UploadFailed(
                    f"{_redact_url(url)} refused {path.name}: {problem}",
                    "a presigned url may have expired, or be for another name or size",
                )
    raise UploadFailed(
        f"{_redact_url(url)} did not take {path.name} in {tries} tries; the last: {problem}",
        "look whether the store is up and reachable, and run the command again",
    )


def _send_once(file: BinaryIO, size: int, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """Status and reason of one try; 0 where there was no answer."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.putrequest("PUT", target)
        connection.putheader("Content-Length", str(size))
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        broken = ""
        try:
            while chunk := file.read(CHUNK_BYTES):
                connection.send(chunk)
        except OSError as error:
            # A server that refuses may answer before it has read everything.
            broken = str(error)
        try:
            answer = connection.getresponse()
            return answer.status, f"{answer.status} {answer.reason}"
        except (OSError, http.client.HTTPException) as error:
            return 0, broken or str(error) or type(error).__name__
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()


def _redact_url(url: str) -> str:
    """The URL without its query, which may be secret: a presigned URL is signed there."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{parts.path}"
