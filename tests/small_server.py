"""A small inference server without a model. It can be busy, hang, disconnect, end and restart."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web

from sightline.launch.processes import reserve_port
from sightline.wire.codec import get_release
from sightline.wire.generate import (
    WEIGHTS_UNAVAILABLE,
    Choice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    TokenLogprob,
    VersionSpan,
)
from sightline.wire.weights import read_manifest

TOKEN = 3


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@dataclass
class SmallServer:
    label: str = "0"
    """The label of its weights."""
    leased_to: str = ""
    running: int = 0
    step_s: float = 0.0
    """Duration of the current step in /health."""
    port: int = field(default_factory=lambda: reserve_port("127.0.0.1", 0, "port"))
    asked: Counter[str] = field(default_factory=Counter)
    """Requests, by path."""
    refusals: list[int] = field(default_factory=list)
    """Statuses of the next generate requests."""
    adopted: list[str] = field(default_factory=list)
    is_store_away: bool = False
    """Whether fetching the weights to adopt fails."""
    ends_by_generating: bool = False
    """Whether a generate request ends the server."""

    def __post_init__(self) -> None:
        self.answers = asyncio.Event()
        """While it is not set, the server hangs and does not answer, even at /health."""
        self.generates = asyncio.Event()
        self.adopts = asyncio.Event()
        for event in (self.answers, self.generates, self.adopts):
            event.set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> SmallServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.end()

    async def start(self) -> None:
        app = web.Application(middlewares=[self._count])
        app.router.add_get("/health", self._health)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/sightline/v1/lease", self._lease)
        app.router.add_post("/sightline/v1/adopt", self._adopt)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def end(self) -> None:
        """Close every connection and stop listening."""
        if self._runner is not None:
            for protocol in self._runner.server.connections if self._runner.server else ():
                with suppress(Exception):
                    protocol.force_close()
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Restart as a new server."""
        await self.end()
        self.label, self.leased_to = "0", ""
        await self.start()

    @web.middleware
    async def _count(self, http: web.Request, handler: object) -> web.StreamResponse:
        self.asked[http.path] += 1
        await self.answers.wait()
        return await handler(http)  # type: ignore[operator, no-any-return]

    async def _health(self, http: web.Request) -> web.Response:
        health = {"release": get_release(), "version": self.label, "leased_to": self.leased_to}
        now = {"running": self.running, "waiting": 0, "step_s": self.step_s}
        return web.json_response({**health, **now})

    async def _generate(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        await self.generates.wait()
        if self.ends_by_generating:
            assert http.transport is not None
            http.transport.abort()
            await asyncio.sleep(60)
        if self.refusals:
            return web.Response(status=self.refusals.pop(0), text="{}")
        choice = Choice(
            0,
            [TOKEN],
            "length",
            Logprobs([TokenLogprob(TOKEN, -1.0)]),
            [VersionSpan(self.label, 0, 1)],
        )
        return web.Response(
            body=msgspec.json.encode(GenerateResponse(request.request_id, [choice]))
        )

    async def _lease(self, http: web.Request) -> web.Response:
        body = json.loads(await http.read())
        if self.leased_to not in ("", body["run"]):
            error = {
                "type": "leased",
                "message": f"leased to {self.leased_to}",
                "fix": "",
                "code": 409,
            }
            return web.json_response({"error": error}, status=409)
        self.leased_to = body["run"] if body["seconds"] else ""
        return web.json_response({})

    async def _adopt(self, http: web.Request) -> web.Response:
        path = Path(json.loads(await http.read())["manifest"])
        await self.adopts.wait()
        if self.is_store_away:
            error = {
                "type": WEIGHTS_UNAVAILABLE,
                "message": "the store is not available",
                "fix": "",
                "code": 503,
            }
            return web.json_response({"error": error}, status=503)
        self.label = read_manifest(path).label
        self.adopted.append(path.parent.name)
        return web.json_response({})
