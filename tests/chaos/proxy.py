"""Stands between a run and its server, and disturbs what passes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientSession, web

GENERATE = "/inference/v1/generate"


class Proxy:
    def __init__(self, server: str) -> None:
        self._server = server
        self._how = ""
        self._num_requests = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @contextmanager
    def disturbed(self, how: str) -> Iterator[None]:
        self._how = how
        try:
            yield
        finally:
            self._how = ""

    async def _start(self) -> str:
        self._session = ClientSession()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        is_generate = request.path == GENERATE
        how = self._how if is_generate else ""
        self._num_requests += is_generate
        is_odd = self._num_requests % 2 == 1
        if how == "refusals" and is_odd:
            return web.Response(status=503, headers={"retry-after": "1"})
        if how == "slow answers":
            await asyncio.sleep(2.0)
        kept = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        async with self._session.request(
            request.method, self._server + request.path_qs, headers=kept, data=await request.read()
        ) as answer:
            data, status = await answer.read(), answer.status
            kind = answer.content_type
        if how == "cut" and is_odd:
            assert request.transport is not None
            request.transport.abort()
        if how == "garbage":
            data = b"\x00\xff" * 200
        elif how and status == 200:
            said = json.loads(data)
            spoil_answer(said, how)
            data = json.dumps(said).encode()
        return web.Response(body=data, status=status, content_type=kind)


def spoil_answer(said: dict[str, Any], how: str) -> None:
    choice = said["choices"][0]
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["content"]
    match how:
        case "no choices":
            said["choices"] = []
        case "logprob over 0":
            logprobs[0]["logprob"] = 0.5
        case "too many tokens":
            tokens *= 8
            logprobs *= 8
            choice["weight_versions"][-1]["end"] = len(tokens)
        case "replaced token":
            tokens[0] = (tokens[0] + 1) % 200
        case "finish reason":
            choice["finish_reason"] = "bored"
        case "version 999999":
            _, dash, rest = choice["weight_versions"][0]["version"].partition("-")
            choice["weight_versions"][0]["version"] = f"999999{dash}{rest}"
        case "another digest":
            for span in choice["weight_versions"]:
                span["version"] = span["version"][:-4] + "0000"
