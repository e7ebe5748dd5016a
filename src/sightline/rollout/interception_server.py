"""The interception server: any program with an OpenAI SDK talks to the model that is trained.

One port a worker process, one key a rollout; each request becomes a turn of its trace.

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
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sightline.errors import EngineError, EnvironmentFailed, SightlineError
from sightline.media import MediaRef, UrlRefCache
from sightline.message import ImageResolver, Message
from sightline.rollout.chat import CompletedTurn, RolloutChat
from sightline.rollout.model_chat import AgentEndpoint
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
from sightline.rollout.openai_api.request import ChatRequest, read_chat_request, resolve_images
from sightline.trace.history_match import make_call_id
from sightline.transport.http_server import (
    DEFAULT_LIMITS,
    GuardMiddleware,
    LoopServer,
    RequestGuard,
    read_bearer,
)

MAX_BODY_BYTES = 1 << 28
"""A history of hundreds of screenshots, each in base64."""
MODEL_NAME = "policy"
"""The one model here; a request may call it by any name."""
_HOST = "127.0.0.1"
_CLOSE_S = 1.0
_KEEP_ALIVE_S = 600
_BACKLOG = 1024

_Reply = tuple[ChatRequest, CompletedTurn] | OpenAIErrorResponse
"""What an agent asked for, and the turn that answers it; or why there is none."""


@dataclass
class _AgentSession:
    """A rollout in play, and the requests of its agent that are under way."""

    chat: RolloutChat
    urls: UrlRefCache
    """Images that its agent has shown: a history comes with every request."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)


@dataclass
class AgentCounts:
    """Bytes of HTTP bodies that agents sent and were sent: a history comes with every request."""

    agent_requests: int = 0
    agent_sent_bytes: int = 0
    agent_received_bytes: int = 0


class _RequestBody:
    """The bytes of one request, from its first chunk until they are parsed.

    A history of screenshots in base64 is far larger than anything else that a rollout holds, and an
    answer may take minutes. So nothing else keeps it, and its bytes count while it is here.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes received; they count on once taken, as what they are parsed into is as large."""
        self._parts: list[bytes] = []

    async def receive(self, http: Request, max_bytes: int) -> None:
        """Raises EngineError, before it reads on, when the body has more than `max_bytes` bytes."""
        if int(http.headers.get("content-length", 0)) > max_bytes:
            raise _too_large_error(max_bytes)
        # Not http.body(): the request would keep what it returns until it is answered, and the
        # event loop would put it together.
        async for part in http.stream():
            self._parts.append(part)
            self.num_bytes += len(part)
            if self.num_bytes > max_bytes:
                raise _too_large_error(max_bytes)

    def take(self) -> bytes:
        """The bytes, which are the caller's from here on."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _too_large_error(max_bytes: int) -> EngineError:
    return EngineError(
        f"the body has more than the {max_bytes} bytes that this server reads",
        "send fewer or smaller images: a window of the history, or media: urls of stored ones",
        kind="request_too_large",
        status=413,
    )


class InterceptionServer:
    """Listens from the first `open_base_url` on. `resolver` takes the images of requests in."""

    def __init__(self, resolver: ImageResolver) -> None:
        self.max_body_bytes = MAX_BODY_BYTES
        self.limits = DEFAULT_LIMITS
        self._resolver = resolver
        self._bodies: set[_RequestBody] = set()
        self.counts = AgentCounts()
        """Requests and bytes since the start, of all rollouts."""
        self._sessions: dict[str, _AgentSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._start_lock = threading.Lock()
        self._started: Future[None] | None = None
        self._server: LoopServer | None = None

    def open_base_url(self) -> str:
        """The address; starts to listen at the first call, in any thread, of a rollout in play."""
        with self._start_lock:
            if self._socket is None:
                if self._loop is None:
                    raise EnvironmentFailed(
                        "no rollout is in play", "use chat.base_url inside of rollout()"
                    )
                # Connections that come before the server is up wait in the socket.
                self._socket = socket.create_server((_HOST, 0), backlog=_BACKLOG)
                self._started = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
            return f"http://{_HOST}:{self._socket.getsockname()[1]}/v1"

    @property
    def memory_bytes(self) -> int:
        """Bytes of requests that were not turned into messages with refs yet."""
        return sum(body.num_bytes for body in self._bodies)

    @asynccontextmanager
    async def serve_rollout(self, chat: RolloutChat) -> AsyncIterator[None]:
        """Requests with `chat.api_key` reach `chat` while this lasts, and none afterwards."""
        self._loop = asyncio.get_running_loop()
        session = _AgentSession(chat, UrlRefCache(self._resolver.resolve, chat.store))
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        chat.agent_endpoint = AgentEndpoint(key, self.open_base_url)
        try:
            yield
        finally:
            del self._sessions[key]
            if session.requests:
                for request in session.requests:
                    request.cancel()
                await asyncio.wait(session.requests)

    async def close(self) -> None:
        if self._started is not None:
            await asyncio.wrap_future(self._started)
        if self._server is not None:
            await self._server.close(_CLOSE_S)

    async def _serve(self) -> None:
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._unknown})
        self._server = LoopServer(
            # Keys are those of rollouts: the guard has none.
            GuardMiddleware(app, RequestGuard(_HOST)),
            self.limits,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        assert self._socket is not None
        await self._server.start(self._socket)

    # -- routes

    async def _unknown(self, http: Request, error: Exception) -> Response:
        return _error_response(NO_SUCH_ROUTE)

    async def _models(self, http: Request) -> Response:
        if self._find_session(http) is None:
            return _error_response(UNKNOWN_KEY)
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "sightline"}
        return _json_response({"object": "list", "data": [model]})

    async def _complete(self, http: Request) -> Response:
        session = self._find_session(http)
        if session is None:
            return _error_response(UNKNOWN_KEY)
        done = await _run_until_over(session, self._answer_request(session, http))
        if isinstance(done, OpenAIErrorResponse):
            return _error_response(done)
        request, turn = done
        name = f"chatcmpl-{session.chat.trace.id}-{turn.node.id}"
        answer = _build_completion(turn, name, request.model or MODEL_NAME)
        if not request.stream:
            response = _json_response(completion_body(answer))
            self.counts.agent_received_bytes += len(response.body)
            return response
        # The turn is in the trace: an agent that hangs up now has the rest of its rollout for it.
        return StreamingResponse(
            self._stream(answer, request.include_usage),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    async def _stream(self, answer: ChatCompletion, include_usage: bool) -> AsyncIterator[bytes]:
        for chunk in stream_events(answer, include_usage):
            self.counts.agent_received_bytes += len(chunk)
            yield chunk

    def _find_session(self, http: Request) -> _AgentSession | None:
        return self._sessions.get(read_bearer(http.headers))

    # -- the work

    async def _answer_request(self, session: _AgentSession, http: Request) -> _Reply:
        """Answers a request; whatever goes wrong is answered too, and kept on the trace."""
        chat, body = session.chat, _RequestBody()
        self._bodies.add(body)
        try:
            await body.receive(http, self.max_body_bytes)
            self.counts.agent_requests += 1
            self.counts.agent_sent_bytes += body.num_bytes
            with _cancelled_when_gone(http):
                await chat.finish_writes()  # the agent may name an image that was just put
                request, messages = await chat.run_in_pool(self._read_request, session, body)
        except SightlineError as error:
            chat.record_refusal(error)
            return OpenAIErrorResponse.of(error)
        except ClientDisconnect:
            return ROLLOUT_OVER  # which nobody hears
        finally:
            self._bodies.discard(body)
        try:
            max_tokens = request.max_tokens or chat.max_tokens
            with _cancelled_when_gone(http):
                return request, await chat.answer(messages, request.tools, max_tokens)
        except SightlineError as error:
            refusal = OpenAIErrorResponse.of(error)
            if refusal.status == 500:
                # A promise is broken. The agent may go on; its rollout may not train.
                chat.failures.append(error)
            elif isinstance(error, EngineError):
                chat.record_refusal(error)
            return refusal
        except Exception as error:  # an endpoint: the agent is told, and the rollout ends
            chat.failures.append(
                EnvironmentFailed(
                    f"a request of the agent failed: {traceback.format_exc()}",
                    "this is a bug of the endpoint; report it",
                )
            )
            return OpenAIErrorResponse(500, type(error).__name__, f"{error}")

    def _read_request(
        self, session: _AgentSession, body: _RequestBody
    ) -> tuple[ChatRequest, list[Message]]:
        """In a thread: base64 is decoded, images are written, and the body is let go."""
        limit = session.chat.max_model_len
        request = read_chat_request(body.take(), max_model_len=limit)

        def take(url: str, path: str) -> MediaRef:
            return session.chat.substitute_image(url, session.urls.resolve(url, path))

        messages = session.chat.renderer.read_messages(resolve_images(request.messages, take))
        return replace(request, messages=[]), messages


async def _run_until_over(session: _AgentSession, work: Coroutine[Any, Any, _Reply]) -> _Reply:
    """Does `work` unless the rollout ends first or the agent hangs up."""
    task = asyncio.create_task(work)
    session.requests.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        return ROLLOUT_OVER
    finally:
        session.requests.discard(task)


@contextmanager
def _cancelled_when_gone(http: Request) -> Iterator[None]:
    """Cancels this task when its agent hangs up, which is all that comes after a body: the answer
    would never be seen, so that it is not sampled to the end."""
    task = asyncio.current_task()
    assert task is not None
    gone = asyncio.ensure_future(http.receive())
    gone.add_done_callback(lambda over: over.cancelled() or task.cancel())
    try:
        yield
    finally:
        gone.cancel()


def _build_completion(turn: CompletedTurn, name: str, model: str) -> ChatCompletion:
    node, message = turn.node, turn.message
    choice = ChatChoice(
        message,
        call_ids=[make_call_id(node.id, k) for k in range(len(message.tool_calls))],
        stopped=node.finish_reason == "stop",
        num_tokens=node.num_sampled,
    )
    num_prompt, num_cached = turn.num_prompt_tokens, turn.num_cached_tokens
    return ChatCompletion(name, model, int(time.time()), [choice], num_prompt, num_cached)


def _json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error_response(error: OpenAIErrorResponse) -> Response:
    response = _json_response(error.body)
    response.status_code = error.status
    response.headers.update(error.headers)
    return response
