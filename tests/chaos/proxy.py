"""A proxy between a run and its server that disturbs requests and answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientSession, web

GENERATE = "/inference/v1/generate"
SLOW_S = 2.0
OF_THE_WIRE = ("refusals", "slow answers", "cut", "torn", "down", "stale lists")
"""Disturbances that leave what is said as it is."""
OF_CONNECTION = ("content-length", "transfer-encoding", "connection", "content-encoding")


class Proxy:
    def __init__(self, server: str, path: str = GENERATE, port: int = 0) -> None:
        """Requests whose path begins with `path` may be disturbed."""
        self._server, self._path, self._port = server, path, port
        self._how = ""
        self.num_requests = 0
        self._lists: dict[str, tuple[bytes, int, dict[str, str]]] = {}
        """The last undisturbed answer to each request for a list of objects."""
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
        self._loop.close()

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
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        is_watched = request.path.startswith(self._path)
        how = self._how if is_watched else ""
        self.num_requests += is_watched
        is_odd = self.num_requests % 2 == 1
        if how == "refusals" and is_odd:
            return web.Response(status=503, headers={"retry-after": "1"})
        if how == "down":
            assert request.transport is not None
            request.transport.abort()
        if how == "stale lists" and request.path_qs in self._lists:
            data, status, reply_headers = self._lists[request.path_qs]
            return web.Response(body=data, status=status, headers=reply_headers)
        if how == "slow answers":
            await asyncio.sleep(SLOW_S)
        headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        async with self._session.request(
            request.method,
            self._server + request.path_qs,
            headers=headers,
            data=await request.read(),
        ) as answer:
            data, status = await answer.read(), answer.status
            reply_headers = {
                k: v for k, v in answer.headers.items() if k.lower() not in OF_CONNECTION
            }
        if "list-type" in request.query and not how:
            self._lists[request.path_qs] = data, status, reply_headers
        if how == "cut" and is_odd:
            assert request.transport is not None
            request.transport.abort()
        if how == "torn" and is_odd and len(data) > 1:
            return await self._tear(request, status, reply_headers, data)
        if how == "garbage":
            data = b"\x00\xff" * 200
        elif how not in ("", *OF_THE_WIRE) and status == 200:
            body = json.loads(data)
            spoil_answer(body, how)
            data = json.dumps(body).encode()
        if request.method == "HEAD":
            reply_headers["content-length"] = answer.headers.get("content-length", "0")
        return web.Response(body=data, status=status, headers=reply_headers)

    async def _tear(
        self, request: web.Request, status: int, reply_headers: dict[str, str], data: bytes
    ) -> web.StreamResponse:
        """Send half of the body, then close the connection."""
        torn = web.StreamResponse(
            status=status, headers={**reply_headers, "content-length": str(len(data))}
        )
        await torn.prepare(request)
        await torn.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.close()
        return torn


def spoil_answer(answer: dict[str, Any], how: str) -> None:
    choice = answer["choices"][0]
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["content"]
    match how:
        case "no choices":
            answer["choices"] = []
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
