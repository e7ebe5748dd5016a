"""One port a worker process, one key a rollout; each request becomes a turn of its trace.

    agent --POST /v1/chat/completions--> images into the store --> messages
          <--answer or typed error-- commit <-- generate <-- the trace's next turn

      a request waits for: its turn at the trace, the server      unblocked by: both
      the end of a rollout waits for: its requests, cancelled     unblocked by: at once

Everything runs on the worker's event loop; what takes a while runs in threads. A program that
blocks that loop would wait for itself.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from sightline.errors import EngineError, EnvironmentFailed, SightlineError
from sightline.media import MediaRef, SeenUrls
from sightline.message import Door, Message
from sightline.rollout.chat import Answered, RolloutChat
from sightline.rollout.dialect.answer import Answer, Said, chunks, completion
from sightline.rollout.dialect.asked import Asked, read_asked
from sightline.rollout.dialect.images import take_images
from sightline.rollout.dialect.refusal import (
    NO_SUCH_ROUTE,
    ROLLOUT_OVER,
    UNKNOWN_KEY,
    Refusal,
)
from sightline.rollout.intercept.body import Body
from sightline.rollout.intercept.receiving import Receiver, Receiving
from sightline.trace.recognise import call_id
from sightline.wire.exposition import CONTENT_TYPE, Labelled, exposition

MAX_BODY_BYTES = 1 << 28
"""A history of hundreds of screenshots, each in base64."""
MODEL = "policy"
"""The one model here; a request may call it by any name."""
_CLOSE_S = 1.0
_BACKLOG = 1024

_Done = tuple[Asked, Answered] | Refusal
"""What an agent asked for and was told."""


@dataclass
class _Guest:
    """A rollout in play, and the requests of its agent that are under way."""

    chat: RolloutChat
    urls: SeenUrls
    """What its agent has shown: a history comes with every request."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass
class AgentCounts:
    """Bytes of HTTP bodies that agents sent and were sent: a history comes with every request."""

    agent_requests: int = 0
    agent_sent_bytes: int = 0
    agent_received_bytes: int = 0
    agent_receive_cpu_us: int = 0
    """CPU time of receiving requests, in the kernel and the HTTP library."""
    agent_cpu_us: int = 0
    """CPU time of reading them: JSON, one hash over each url, and new images."""


class Interception:
    """Listens from the first use of `base_url` on. `door` takes the images of requests in."""

    def __init__(self, door: Door) -> None:
        self.max_body_bytes = MAX_BODY_BYTES
        self._door = door
        self._bodies: set[Body] = set()
        self._counts = AgentCounts()
        self._receiving = Receiving()
        self._guests: dict[str, _Guest] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._starting = threading.Lock()
        self._counting = threading.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        """May be asked for in any thread, while a rollout is in play."""
        with self._starting:
            if self._socket is None:
                if self._loop is None:
                    raise EnvironmentFailed(
                        "no rollout is in play", "use chat.base_url inside of rollout()"
                    )
                # Connections that come before the server is up wait in the socket.
                self._socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
                self._loop.call_soon_threadsafe(self._start)
            return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    @property
    def counts(self) -> AgentCounts:
        """All since the start, of all rollouts."""
        return replace(self._counts, agent_receive_cpu_us=self._receiving.cpu_ns // 1000)

    @property
    def held_bytes(self) -> int:
        """Of requests that were not turned into messages with refs yet."""
        return sum(body.num_bytes for body in self._bodies)

    @asynccontextmanager
    async def admit(self, chat: RolloutChat) -> AsyncIterator[None]:
        """Requests with `chat.api_key` reach `chat` while this lasts, and none afterwards."""
        self._loop = asyncio.get_running_loop()
        chat.api_key, chat.interception = f"sk-{secrets.token_urlsafe(24)}", self
        urls = SeenUrls(self._door.resolve, chat.store)
        guest = self._guests[chat.api_key] = _Guest(chat, urls)
        try:
            yield
        finally:
            del self._guests[chat.api_key]
            if guest.requests:
                for request in guest.requests:
                    request.cancel()
                await asyncio.wait(guest.requests)

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _start(self) -> None:
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # An agent that hangs up never sees the answer, so that it is not sampled to the end.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_S
        )
        await self._runner.setup()
        serve = self._runner.server
        assert self._socket is not None and serve is not None
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: Receiver(serve(), self._receiving), sock=self._socket, backlog=_BACKLOG
        )

    # -- routes

    async def _unknown(self, http: web.Request) -> web.Response:
        return _refused(NO_SUCH_ROUTE)

    async def _metrics(self, http: web.Request) -> web.Response:
        """Counts only, so that no key is asked for."""
        counts: list[Labelled] = [
            ("counter", name, {}, float(n)) for name, n in asdict(self.counts).items()
        ]
        text = exposition([*counts, ("gauge", "agent_rollouts", {}, float(len(self._guests)))])
        return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})

    async def _models(self, http: web.Request) -> web.Response:
        if self._guest(http) is None:
            return _refused(UNKNOWN_KEY)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sightline"}
        return _json({"object": "list", "data": [model]})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        guest = self._guest(http)
        if guest is None:
            return _refused(UNKNOWN_KEY)
        done = await _run(guest, self._received(guest, http))
        if isinstance(done, Refusal):
            return _refused(done)
        asked, answered = done
        name = f"chatcmpl-{guest.chat.trace.id}-{answered.node.id}"
        answer = _answer(answered, name, asked.model or MODEL)
        if not asked.stream:
            whole = _json(completion(answer))
            self._counts.agent_received_bytes += len(whole.body)  # type: ignore[arg-type]
            return whole
        stream = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-cache"}
        )
        # The turn is in the trace: an agent that hangs up now has the rest of its rollout for it.
        with suppress(ConnectionError):
            await stream.prepare(http)
            for chunk in chunks(answer, asked.include_usage):
                self._counts.agent_received_bytes += len(chunk)
                await stream.write(chunk)
            await stream.write_eof()
        return stream

    def _guest(self, http: web.Request) -> _Guest | None:
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        return self._guests.get(key.strip()) if scheme.lower() == "bearer" else None

    # -- the work

    async def _received(self, guest: _Guest, http: web.Request) -> _Done:
        body = Body()
        self._bodies.add(body)
        try:
            await body.receive(http, self.max_body_bytes)
            self._counts.agent_requests += 1
            self._counts.agent_sent_bytes += body.num_bytes
            return await self._answered(guest, body)
        except EngineError as error:
            guest.chat.note_refusal(error)
            return Refusal.of(error)
        finally:
            self._bodies.discard(body)

    async def _answered(self, guest: _Guest, body: Body) -> _Done:
        """What an agent asked for and was told; whatever goes wrong is answered, and kept."""
        chat = guest.chat
        try:
            asked, messages = await chat.in_pool(self._read, guest, body)
        except SightlineError as error:
            chat.note_refusal(error)
            return Refusal.of(error)
        self._bodies.discard(body)
        try:
            most = asked.max_tokens if asked.max_tokens is not None else chat.max_tokens
            return asked, await chat.answer(messages, asked.tools, most)
        except SightlineError as error:
            refusal = Refusal.of(error)
            if refusal.status == 500:
                # A promise is broken. The agent may go on; its rollout may not train.
                chat.failure = chat.failure or error
            elif isinstance(error, EngineError):
                chat.note_refusal(error)
            return refusal
        except Exception as error:  # a server's door: the agent is told, and the rollout ends
            chat.failure = chat.failure or EnvironmentFailed(
                f"a request of the agent failed: {traceback.format_exc()}",
                "this is a bug of the endpoint; report it",
            )
            return Refusal(500, type(error).__name__, f"{error}")

    def _read(self, guest: _Guest, body: Body) -> tuple[Asked, list[Message]]:
        """In a thread: base64 is decoded, images are written, and the body is let go."""
        began = time.thread_time_ns()
        asked = read_asked(body.take())

        def take(url: str, path: str) -> MediaRef:
            return guest.chat.stand_in(url, guest.urls.resolve(url, path))

        messages = guest.chat.renderer.read(take_images(asked.messages, take))
        asked = replace(asked, messages=[])
        with self._counting:
            self._counts.agent_cpu_us += (time.thread_time_ns() - began) // 1000
        return asked, messages


async def _run(guest: _Guest, work: Coroutine[Any, Any, Any]) -> Any:
    """Does `work` unless the rollout ends first or the agent hangs up."""
    task = asyncio.create_task(work)
    guest.requests.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        handler = asyncio.current_task()
        if handler is not None and handler.cancelling():
            raise
        return ROLLOUT_OVER
    finally:
        guest.requests.discard(task)


def _answer(answered: Answered, name: str, model: str) -> Answer:
    node, message = answered.node, answered.message
    said = Said(
        message,
        call_ids=[call_id(node.id, k) for k in range(len(message.tool_calls))],
        stopped=node.finish_reason == "stop",
        num_tokens=node.num_sampled,
    )
    return Answer(name, model, int(time.time()), [said], answered.num_prompt, answered.num_cached)


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _refused(refusal: Refusal) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(refusal.body),
        status=refusal.status,
        headers=refusal.headers,
        content_type="application/json",
    )
