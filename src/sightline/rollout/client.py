"""Speaks the generate protocol: references out, tokens back. Retries only what may heal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from sightline.errors import EngineError
from sightline.rollout.pacer import LoopPacer
from sightline.run.stages import NO_STAGE, Stage
from sightline.wire.generate import (
    AdoptRequest,
    ErrorAnswer,
    GenerateRequest,
    GenerateResponse,
)

_encoder = msgspec.json.Encoder()
_responses = msgspec.json.Decoder(GenerateResponse)
_errors = msgspec.json.Decoder(ErrorAnswer)
RETRY_STATUS = 503
"""The one status after which the same request may be answered."""
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 5.0


@dataclass
class WireCounts:
    """Bytes that crossed the wire to the server, by what they were."""

    requests: int = 0
    retries: int = 0
    sent_bytes: int = 0
    reference_bytes: int = 0
    """Of `sent_bytes`, those that name images."""
    received_bytes: int = 0
    request_cpu_us: int = 0
    """CPU time spent on the one thing that grows with the history: making the requests."""


@dataclass
class GenerateClient:
    """One per process. `deadline_s` bounds retries, from the first failure on; a generation that is
    under way may take as long as it does."""

    base_url: str
    deadline_s: float = 60.0
    connections: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """The processor settings of this side, to show beside the server's where they differ."""
    counts: WireCounts = field(default_factory=WireCounts)
    pacer: LoopPacer = field(default_factory=LoopPacer)
    """Of all who make requests here: their work comes one after another."""

    def __post_init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def for_server(self, base_url: str) -> Self:
        """The same for another server: it counts for itself, and keeps pace with this one."""
        return replace(self, base_url=base_url, counts=WireCounts())

    async def generate(self, request: GenerateRequest, turn: Stage = NO_STAGE) -> GenerateResponse:
        """`turn` is the stage that the request is a part of."""
        with self.making_request():
            body = _encoder.encode(request)
        if request.features is not None:
            self.counts.reference_bytes += sum(
                len(raw) for raws in request.features.kwargs_data.values() for raw in raws
            )
        with turn.begin("generate", server=self.base_url, request_bytes=len(body)) as stage:
            answer = await self.post("/inference/v1/generate", body, stage)
        await self.pacer.turn()
        return _responses.decode(answer)

    @contextlib.contextmanager
    def making_request(self) -> Iterator[None]:
        """Counts the CPU time of this thread; nothing may be awaited inside."""
        began = time.thread_time_ns()
        yield
        self.counts.request_cpu_us += (time.thread_time_ns() - began) // 1000

    async def adopt(self, manifest: str) -> None:
        path = str(Path(manifest).absolute())  # the server may run in another folder
        await self.post("/sightline/v1/adopt", _encoder.encode(AdoptRequest(path)))

    async def get(self, path: str) -> bytes:
        async with self._get_session().get(self.base_url + path) as answer:
            return await answer.read()

    async def wait_healthy(self) -> None:
        """Returns when the server answers; the launcher ends the run if it never will."""
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._get_session().get(self.base_url + "/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.connections),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            )
        return self._session

    async def post(self, path: str, body: bytes, stage: Stage = NO_STAGE) -> bytes:
        give_up = math.inf
        wait_s = _FIRST_RETRY_S
        headers = {"Content-Type": "application/json", **stage.headers}
        num_tries = 0
        while True:
            num_tries += 1
            found = await self._try(path, body, headers)
            if isinstance(found, bytes):
                return found
            error, asked_s = found
            # From the first failure on: the answer that it is about may have been long under way.
            give_up = min(give_up, time.monotonic() + self.deadline_s)
            # Spread out, so that many who were refused together do not come back together.
            pause_s = max(wait_s, asked_s) * (0.75 + 0.5 * random.random())
            if error.status != RETRY_STATUS or time.monotonic() + pause_s > give_up:
                raise self._add_settings(error)
            self.counts.retries += 1
            stage.note(retries=num_tries)
            await asyncio.sleep(pause_s)
            wait_s = min(wait_s * 2, _LONGEST_RETRY_S)

    def _add_settings(self, error: EngineError) -> EngineError:
        if error.kind != "fingerprint" or not self.settings:
            return error
        ours = json.dumps(self.settings, sort_keys=True)
        return EngineError(f"{error.problem}; ours: {ours}", error.fix, error.kind, error.status)

    async def _try(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> bytes | tuple[EngineError, float]:
        """The answer; or what went wrong, and the seconds for which the server asks."""
        self.counts.requests += 1
        self.counts.sent_bytes += len(body)
        try:
            async with self._get_session().post(
                self.base_url + path, data=body, headers=headers
            ) as answer:
                data = await answer.read()
                self.counts.received_bytes += len(data)
                if answer.status == 200:
                    return data
                after = answer.headers.get("retry-after", "")
                return _read_error(answer.status, data), float(after) if after.isdigit() else 0.0
        except aiohttp.ClientError as error:
            unreachable = EngineError(
                f"the inference server at {self.base_url} does not answer: {error}",
                "look at its log (logs/server.log where the run started it), and start it again",
                kind="unreachable",
                status=RETRY_STATUS,
            )
            return unreachable, 0.0


def _read_error(status: int, data: bytes) -> EngineError:
    try:
        body = _errors.decode(data).error
    except msgspec.MsgspecError:
        text = data[:200].decode(errors="replace")
        return EngineError(
            f"the inference server answered {status}: {text}",
            "look at the server's log",
            kind="foreign",
            status=status,
        )
    return EngineError(
        body.message, body.fix or "see docs/serving.md", kind=body.type, status=status
    )
