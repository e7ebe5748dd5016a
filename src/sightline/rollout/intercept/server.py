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
from sightline.media import MediaRef, UrlRefCache
from sightline.message import ImageResolver, Message
from sightline.rollout.chat import CompletedTurn, RolloutChat
from sightline.rollout.intercept.body import RequestBody
from sightline.rollout.intercept.receive_meter import MeteredProtocol, ReceiveMeter
from sightline.rollout.openai_api.completion import (
    ChatChoice,
    ChatCompletion,
    completion_body,
    stream_events,
)
from sightline.rollout.openai_api.error_response import (
    NO_SUCH_ROUTE,
    ROLLOUT_OVER,
    UNKNOWN_KEY,
    OpenAIErrorResponse,
)
from sightline.rollout.openai_api.images import resolve_images
from sightline.rollout.openai_api.request import ChatRequest, read_chat_request
from sightline.trace.history_match import make_call_id
from sightline.wire.prometheus import CONTENT_TYPE, LabelledMetric, format_prometheus

MAX_BODY_BYTES = 1 << 28
"""A history of hundreds of screenshots, each in base64."""
MODEL_NAME = "policy"
"""The one model here; a request may call it by any name."""
_CLOSE_S = 1.0
_BACKLOG = 1024

_Reply = tuple[ChatRequest, CompletedTurn] | OpenAIErrorResponse
"""What an agent asked for and was told."""


@dataclass
class _AgentSession:
    """A rollout in play, and the requests of its agent that are under way."""

    chat: RolloutChat
    urls: UrlRefCache
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


class InterceptionServer:
    """Listens from the first use of `base_url` on. `resolver` takes the images of requests in."""

    def __init__(self, resolver: ImageResolver) -> None:
        self.max_body_bytes = MAX_BODY_BYTES
        self._resolver = resolver
        self._bodies: set[RequestBody] = set()
        self._counts = AgentCounts()
        self._receive_meter = ReceiveMeter()
        self._sessions: dict[str, _AgentSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._start_lock = threading.Lock()
        self._counts_lock = threading.Lock()
        self._serve_task: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        """May be asked for in any thread, while a rollout is in play."""
        with self._start_lock:
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
        return replace(self._counts, agent_receive_cpu_us=self._receive_meter.cpu_ns // 1000)

    @property
    def held_bytes(self) -> int:
        """Of requests that were not turned into messages with refs yet."""
        return sum(body.num_bytes for body in self._bodies)

    @asynccontextmanager
    async def serve_rollout(self, chat: RolloutChat) -> AsyncIterator[None]:
        """Requests with `chat.api_key` reach `chat` while this lasts, and none afterwards."""
        self._loop = asyncio.get_running_loop()
        chat.api_key, chat.interception = f"sk-{secrets.token_urlsafe(24)}", self
        urls = UrlRefCache(self._resolver.resolve, chat.store)
        session = self._sessions[chat.api_key] = _AgentSession(chat, urls)
        try:
            yield
        finally:
            del self._sessions[chat.api_key]
            if session.requests:
                for request in session.requests:
                    request.cancel()
                await asyncio.wait(session.requests)

    async def close(self) -> None:
        if self._serve_task is not None:
            await self._serve_task
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _start(self) -> None:
        self._serve_task = asyncio.create_task(self._serve())

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
            lambda: MeteredProtocol(serve(), self._receive_meter),
            sock=self._socket,
            backlog=_BACKLOG,
        )

    # -- routes

    async def _unknown(self, http: web.Request) -> web.Response:
        return _error_response(NO_SUCH_ROUTE)

    async def _metrics(self, http: web.Request) -> web.Response:
        """Counts only, so that no key is asked for."""
        counts: list[LabelledMetric] = [
            ("counter", name, {}, float(n)) for name, n in asdict(self.counts).items()
        ]
        text = format_prometheus(
            [*counts, ("gauge", "agent_rollouts", {}, float(len(self._sessions)))]
        )
        return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})

    async def _models(self, http: web.Request) -> web.Response:
        if self._find_session(http) is None:
            return _error_response(UNKNOWN_KEY)
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "sightline"}
        return _json_response({"object": "list", "data": [model]})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        session = self._find_session(http)
        if session is None:
            return _error_response(UNKNOWN_KEY)
        done = await _run_until_over(session, self._receive_request(session, http))
        if isinstance(done, OpenAIErrorResponse):
            return _error_response(done)
        asked, answered = done
        name = f"chatcmpl-{session.chat.trace.id}-{answered.node.id}"
        answer = _build_completion(answered, name, asked.model or MODEL_NAME)
        if not asked.stream:
            whole = _json_response(completion_body(answer))
            self._counts.agent_received_bytes += len(whole.body)  # type: ignore[arg-type]
            return whole
        stream = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-cache"}
        )
        # The turn is in the trace: an agent that hangs up now has the rest of its rollout for it.
        with suppress(ConnectionError):
            await stream.prepare(http)
            for chunk in stream_events(answer, asked.include_usage):
                self._counts.agent_received_bytes += len(chunk)
                await stream.write(chunk)
            await stream.write_eof()
        return stream

    def _find_session(self, http: web.Request) -> _AgentSession | None:
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        return self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None

    # -- the work

    async def _receive_request(self, session: _AgentSession, http: web.Request) -> _Reply:
        body = RequestBody()
        self._bodies.add(body)
        try:
            await body.receive(http, self.max_body_bytes)
            self._counts.agent_requests += 1
            self._counts.agent_sent_bytes += body.num_bytes
            return await self._answer_request(session, body)
        except EngineError as error:
            session.chat.record_refusal(error)
            return OpenAIErrorResponse.of(error)
        finally:
            self._bodies.discard(body)

    async def _answer_request(self, session: _AgentSession, body: RequestBody) -> _Reply:
        """What an agent asked for and was told; whatever goes wrong is answered, and kept."""
        chat = session.chat
        try:
            asked, messages = await chat.run_in_pool(self._read_request, session, body)
        except SightlineError as error:
            chat.record_refusal(error)
            return OpenAIErrorResponse.of(error)
        self._bodies.discard(body)
        try:
            max_tokens = asked.max_tokens if asked.max_tokens is not None else chat.max_tokens
            return asked, await chat.answer(messages, asked.tools, max_tokens)
        except SightlineError as error:
            refusal = OpenAIErrorResponse.of(error)
            if refusal.status == 500:
                # A promise is broken. The agent may go on; its rollout may not train.
                chat.failure = chat.failure or error
            elif isinstance(error, EngineError):
                chat.record_refusal(error)
            return refusal
        except Exception as error:  # a server's door: the agent is told, and the rollout ends
            chat.failure = chat.failure or EnvironmentFailed(
                f"a request of the agent failed: {traceback.format_exc()}",
                "this is a bug of the endpoint; report it",
            )
            return OpenAIErrorResponse(500, type(error).__name__, f"{error}")

    def _read_request(
        self, session: _AgentSession, body: RequestBody
    ) -> tuple[ChatRequest, list[Message]]:
        """In a thread: base64 is decoded, images are written, and the body is let go."""
        began = time.thread_time_ns()
        asked = read_chat_request(body.take())

        def take(url: str, path: str) -> MediaRef:
            return session.chat.substitute_image(url, session.urls.resolve(url, path))

        messages = session.chat.renderer.read_messages(resolve_images(asked.messages, take))
        asked = replace(asked, messages=[])
        with self._counts_lock:
            self._counts.agent_cpu_us += (time.thread_time_ns() - began) // 1000
        return asked, messages


async def _run_until_over(session: _AgentSession, work: Coroutine[Any, Any, Any]) -> Any:
    """Does `work` unless the rollout ends first or the agent hangs up."""
    task = asyncio.create_task(work)
    session.requests.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        handler = asyncio.current_task()
        if handler is not None and handler.cancelling():
            raise
        return ROLLOUT_OVER
    finally:
        session.requests.discard(task)


def _build_completion(answered: CompletedTurn, name: str, model: str) -> ChatCompletion:
    node, message = answered.node, answered.message
    said = ChatChoice(
        message,
        call_ids=[make_call_id(node.id, k) for k in range(len(message.tool_calls))],
        stopped=node.finish_reason == "stop",
        num_tokens=node.num_sampled,
    )
    return ChatCompletion(
        name,
        model,
        int(time.time()),
        [said],
        answered.num_prompt_tokens,
        answered.num_cached_tokens,
    )


def _json_response(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _error_response(refusal: OpenAIErrorResponse) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(refusal.body),
        status=refusal.status,
        headers=refusal.headers,
        content_type="application/json",
    )
