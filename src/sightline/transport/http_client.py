"""Asks one HTTP server, and again where that may heal: the one retry loop of all clients.

request --> server --answer--> bytes
              |--refusal that may heal, or no answer--> pause --> request
  a request waits for: the answer, for as long as it takes      unblocked by: the server
  a retry waits for: its pause, or what the server asks for     unblocked by: a clock
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import aiohttp

from sightline.errors import CERTIFICATE_FIX, EngineError

UNREACHABLE = "unreachable"
"""The kind of an EngineError where nothing answered."""
NUM_SHOWN_CHARS = 200
"""Characters of an answer that an error shows."""


def bearer(token: str) -> dict[str, str]:
    """The header that carries `token`."""
    return {"authorization": f"Bearer {token}"} if token else {}


@dataclass
class RequestCounts:
    """Requests to one server, and the bytes of their bodies."""

    requests: int = 0
    retries: int = 0
    sent_bytes: int = 0
    reference_bytes: int = 0
    """Bytes of `sent_bytes` that name images, where the client knows them."""
    received_bytes: int = 0


@dataclass
class RetryingClient:
    """One for each server. Subclasses say what an answer means that is not 200."""

    base_url: str
    _: KW_ONLY
    deadline_s: float = 60.0
    """Bounds retries, from the first failure on."""
    max_tries: float = math.inf
    timeout_s: float | None = None
    """Longest time of one try; None lets an answer take as long as it does."""
    first_retry_s: float = 0.05
    """Pause before the second try; it doubles from there, up to `longest_retry_s`."""
    longest_retry_s: float = 5.0
    retry_statuses: tuple[int, ...] = (503,)
    """Statuses after which the same request may be answered."""
    token: str = field(default="", repr=False)
    """What the server knows its clients by, sent with every request; empty sends none."""
    unreachable_fix: str = "check the address, and that the server runs"
    """What to do where nothing answers."""
    counts: RequestCounts = field(default_factory=RequestCounts)

    def __post_init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def read_error(self, status: int, data: bytes) -> EngineError:
        """What an answer other than 200 says."""
        text = data[:NUM_SHOWN_CHARS].decode(errors="replace")
        return EngineError(
            f"{self.base_url} answered {status} {text}",
            "look at the server's log",
            kind="foreign",
            status=status,
        )

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        on_retry: Callable[[int], None] = lambda num_tries: None,
    ) -> bytes:
        """The body of the answer; raises EngineError for one that does not come, or is not 200."""
        give_up, wait_s, num_tries = math.inf, self.first_retry_s, 0
        while True:
            num_tries += 1
            found = await self._try(method, path, body, headers or {})
            if isinstance(found, bytes):
                return found
            # From the first failure on: the answer that it is about may have been long under way.
            give_up = min(give_up, time.monotonic() + self.deadline_s)
            # Spread out, so that many who were refused together do not come back together.
            pause_s = max(wait_s, found.retry_after_s) * random.Random().uniform(0.75, 1.25)
            is_over = num_tries >= self.max_tries or time.monotonic() + pause_s > give_up
            if is_over or not self.may_heal(found):
                raise found
            self.counts.retries += 1
            on_retry(num_tries)
            await asyncio.sleep(pause_s)
            wait_s = min(wait_s * 2, self.longest_retry_s)

    async def wait_reachable(self, path: str, timeout_s: float = math.inf) -> bytes:
        """The server's answer to a GET of `path`, once it comes; empty for a refusal for good."""
        give_up = time.monotonic() + timeout_s
        while True:
            found = await self._try("GET", path, None, {})
            if isinstance(found, bytes) or not self.may_heal(found):
                return found if isinstance(found, bytes) else b""
            if time.monotonic() > give_up:
                raise found
            await asyncio.sleep(0.1)

    async def get(self, path: str) -> bytes:
        """One look, whatever the status; raises OSError or a TimeoutError where nothing answers."""
        async with self._get_session().get(self.base_url + path) as answer:
            return await answer.read()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def may_heal(self, error: EngineError) -> bool:
        """Whether the same request may be answered later, or by another server."""
        return error.kind == UNREACHABLE or error.status in self.retry_statuses

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            is_tls = self.base_url.startswith("https://")
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    # Verified, by the system's authorities or those of SSL_CERT_FILE.
                    limit=0,
                    ssl=ssl.create_default_context() if is_tls else True,
                ),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=10),
                headers={"content-type": "application/json", **bearer(self.token)},
            )
        return self._session

    async def _try(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes | EngineError:
        """The answer, or what went wrong."""
        self.counts.requests += 1
        self.counts.sent_bytes += len(body or b"")
        try:
            async with self._get_session().request(
                method, self.base_url.rstrip("/") + path, data=body, headers=headers
            ) as answer:
                data = await answer.read()
                self.counts.received_bytes += len(data)
                if answer.status == 200:
                    return data
                refusal = self.read_error(answer.status, data)
                after = answer.headers.get("retry-after", "")
                refusal.retry_after_s = float(after) if after.isdigit() else 0.0
                return refusal
        except aiohttp.ClientConnectorCertificateError as error:
            problem = f"the certificate of {self.base_url} is not trusted: {error}"
            return EngineError(problem, CERTIFICATE_FIX, kind="certificate", status=526)
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{self.base_url} does not answer: {type(error).__name__} {error}"
            return EngineError(problem, self.unreachable_fix, kind=UNREACHABLE, status=503)
