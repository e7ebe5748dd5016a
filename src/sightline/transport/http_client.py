"""An HTTP client for one server, with the retry loop that all clients share.

request --> server --answer--> bytes
              |--temporary error, or no answer--> pause --> request
  a request waits for: the answer, without a limit              unblocked by: the server
  a retry waits for: its pause, or the server's retry-after     unblocked by: a timer
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import aiohttp

from sightline.errors import CERTIFICATE_FIX, EngineError

UNREACHABLE = "unreachable"
"""The kind of an EngineError if nothing answered."""
NUM_SHOWN_CHARS = 200
"""Characters of an answer that an error message shows."""


def bearer(token: str) -> dict[str, str]:
    """Return the header that carries `token`."""
    return {"authorization": f"Bearer {token}"} if token else {}


@dataclass
class RetryingClient:
    """A client of one server. Subclasses interpret answers other than 200."""

    base_url: str
    _: KW_ONLY
    deadline_s: float = 60.0
    """Time limit of all retries, from the first failure on."""
    max_tries: float = math.inf
    timeout_s: float | None = None
    """Time limit of one try; None for no limit."""
    first_retry_s: float = 0.05
    """Pause before the first retry. It doubles each time, up to `longest_retry_s`."""
    longest_retry_s: float = 5.0
    retry_statuses: tuple[int, ...] = (503,)
    """Statuses after which the same request may succeed."""
    token: str = field(default="", repr=False)
    """Token sent with every request. Empty for none."""
    unreachable_fix: str = "check the address, and that the server runs"
    """The error's fix if nothing answers."""
    num_requests: int = field(default=0, init=False)
    """Number of requests so far, with retries."""

    def __post_init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def read_error(self, status: int, data: bytes) -> EngineError:
        """Return the error that an answer other than 200 describes."""
        text = data[:NUM_SHOWN_CHARS].decode(errors="replace")
        return EngineError(
            f"{self.base_url} answered {status} {text}",
            "read the server's log",
            kind="foreign",
            status=status,
        )

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of the answer. Raise EngineError if there is none or it is not 200."""
        give_up, wait_s, num_tries = math.inf, self.first_retry_s, 0
        while True:
            num_tries += 1
            result = await self._try(method, path, body, headers or {})
            if isinstance(result, bytes):
                return result
            # Counted from the first failure, because the failed request may have taken long.
            give_up = min(give_up, time.monotonic() + self.deadline_s)
            # Jitter, so that clients that were refused together do not retry together.
            pause_s = max(wait_s, result.retry_after_s) * random.Random().uniform(0.75, 1.25)
            is_over = num_tries >= self.max_tries or time.monotonic() + pause_s > give_up
            if is_over or not self.may_heal(result):
                raise result
            await asyncio.sleep(pause_s)
            wait_s = min(wait_s * 2, self.longest_retry_s)

    async def wait_reachable(self, path: str, timeout_s: float = math.inf) -> bytes:
        """Wait for the answer to a GET of `path`. Return no bytes if it is a permanent refusal."""
        give_up = time.monotonic() + timeout_s
        while True:
            result = await self._try("GET", path, None, {})
            if isinstance(result, bytes) or not self.may_heal(result):
                return result if isinstance(result, bytes) else b""
            if time.monotonic() > give_up:
                raise result
            await asyncio.sleep(0.1)

    async def get(self, path: str) -> bytes:
        """GET once, with any status. Raise OSError or TimeoutError if nothing answers."""
        async with self._get_session().get(self.base_url + path) as answer:
            return await answer.read()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def may_heal(self, error: EngineError) -> bool:
        """Return whether the same request may succeed later, or at another server."""
        return error.kind == UNREACHABLE or error.status in self.retry_statuses

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            is_tls = self.base_url.startswith("https://")
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    # Verified with the system's certificates or those of SSL_CERT_FILE.
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
        """Return the answer or the error."""
        self.num_requests += 1
        try:
            async with self._get_session().request(
                method, self.base_url.rstrip("/") + path, data=body, headers=headers
            ) as answer:
                data = await answer.read()
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
