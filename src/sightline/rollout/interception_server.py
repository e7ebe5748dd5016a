"""The interception server: lets any program with an OpenAI SDK call the policy in training.

Each worker process has one port, and each rollout has its own API key. Each request becomes a turn
in the rollout's trace.

    agent --POST /v1/chat/completions, /v1/responses--> images into the store --> messages
          <--answer or typed error-- commit <-- generate <-- the trace's next turn

      a request waits for: the trace's lock, the server           unblocked by: both
      the end of a rollout waits for: its cancelled requests      unblocked by: cancellation

The server runs on the worker's event loop and does slow work in threads. An agent that blocks the
loop would deadlock.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import traceback
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sightline.errors import (
    EngineError,
    EnvironmentFailed,
    MessageError,
    PromptTooLong,
    RolloutTruncated,
    SightlineError,
)
from sightline.media import MediaRef, UrlRefCache
from sightline.message import ImageResolver, Message
from sightline.rollout.chat import CompletedTurn, RolloutChat
from sightline.rollout.openai_completions import (
    ROLLOUT_UNSUPPORTED,
    ChatDialect,
    ChatRequest,
    build_choice,
    build_completion,
    read_chat_request,
)
from sightline.rollout.openai_http import (
    DIALECTS,
    NO_SUCH_ROUTE,
    ROLLOUT_OVER,
    UNKNOWN_KEY,
    OpenAIErrorResponse,
    completion_response,
    models_response,
)
from sightline.trace.history_match import make_call_id
from sightline.transport.http_server import (
    DEFAULT_LIMITS,
    GuardMiddleware,
    LoopServer,
    RequestGuard,
    read_bearer,
    receive_body,
)

MAX_BODY_BYTES = 1 << 28
"""Enough for a history with hundreds of base64 screenshots."""
MODEL_NAME = "policy"
"""Name of the only model. A request may use any name."""
_HOST = "127.0.0.1"
_CLOSE_S = 1
_KEEP_ALIVE_S = 600
_BACKLOG = 1024

_Reply = tuple[ChatRequest, list[CompletedTurn]] | OpenAIErrorResponse
"""A request with its completed turns, one for each choice, or an error."""


@dataclass
class _AgentSession:
    """A running rollout, and its agent's requests in flight."""

    chat: RolloutChat
    urls: UrlRefCache
    """Images the agent has already sent. It repeats its history in every request."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    responses: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """The turn of each response, and whether its first message is the request's instructions."""

    def resolve(self, url: str, path: str, takes_video: bool) -> MediaRef:
        """Return the image at `url`, or its replacement."""
        return self.chat.substitute_image(url, self.urls.resolve(url, path, takes_video))

    def find_past(self, response_id: str) -> list[Message]:
        """Return the messages up to a response. As at OpenAI, instructions are not carried over."""
        if response_id not in self.responses:
            raise MessageError.at(
                "previous_response_id",
                f"{response_id!r} is not a response of this rollout",
                "send the id of an earlier response, or the whole conversation as input",
            )
        node, has_instructions = self.responses[response_id]
        trace = self.chat.trace
        return [trace.nodes[n].message for n in trace.path(node)][has_instructions:]


class InterceptionServer:
    """A server that starts with the first rollout. `resolver` stores the images in requests."""

    def __init__(self, resolver: ImageResolver) -> None:
        self.max_body_bytes = MAX_BODY_BYTES
        self.limits = DEFAULT_LIMITS
        self._resolver = resolver
        self._sessions: dict[str, _AgentSession] = {}
        self._base_url = ""
        self._server: LoopServer | None = None

    @asynccontextmanager
    async def serve_rollout(self, chat: RolloutChat) -> AsyncIterator[None]:
        """Route requests with `chat.api_key` to `chat` within this context."""
        if self._server is None:
            await self._start()
        session = _AgentSession(chat, UrlRefCache(self._resolver.resolve, chat.store))
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        chat.base_url, chat.api_key = self._base_url, key
        try:
            yield
        finally:
            del self._sessions[key]
            if session.requests:
                for request in session.requests:
                    request.cancel()
                await asyncio.wait(session.requests)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.shutdown()

    async def _start(self) -> None:
        routes = [
            *(
                Route(path, partial(self._complete, kind), methods=["POST"])
                for path, kind in DIALECTS.items()
            ),
            Route("/v1/models", self._models),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._unknown})
        self._server = LoopServer(
            # Each rollout has its own key, so the guard needs no token.
            GuardMiddleware(app, RequestGuard(_HOST), _refuse),
            self.limits,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        # Until the server is up, connections wait in the socket's backlog.
        listener = socket.create_server((_HOST, 0), backlog=_BACKLOG)
        self._base_url = f"http://{_HOST}:{listener.getsockname()[1]}/v1"
        await self._server.start(listener)

    # -- routes

    async def _unknown(self, http: Request, error: Exception) -> Response:
        return NO_SUCH_ROUTE.to_response()

    async def _models(self, http: Request) -> Response:
        if self._find_session(http) is None:
            return UNKNOWN_KEY.to_response()
        return models_response(MODEL_NAME)

    async def _complete(self, kind: type[ChatDialect], http: Request) -> Response:
        session = self._find_session(http)
        if session is None:
            return UNKNOWN_KEY.to_response()
        dialect = kind()
        done = await _run_until_over(session, self._answer_request(session, dialect, http))
        if isinstance(done, OpenAIErrorResponse):
            return done.to_response()
        request, turns = done
        for turn in turns:
            name = f"resp_{session.chat.trace.id}-{turn.node.id}"
            session.responses[name] = turn.node.id, dialect.has_instructions
        # The turns are committed. An agent that disconnects now does not undo them.
        completion = _build_completion(session.chat.trace.id, request, turns)
        return completion_response(request, completion, dialect)

    def _find_session(self, http: Request) -> _AgentSession | None:
        return self._sessions.get(read_bearer(http.headers))

    # -- requests

    async def _answer_request(
        self, session: _AgentSession, dialect: ChatDialect, http: Request
    ) -> _Reply:
        """Answer a request. Errors are returned to the agent and recorded in the trace."""
        chat = session.chat
        try:
            body = await receive_body(http, self.max_body_bytes, "request_too_large")
            with _cancelled_when_gone(http):
                await chat.finish_writes()  # the agent may refer to an image that was just put
                read = partial(_read_request, session, dialect, body)
                request, messages = await chat.run_in_pool(read)
        except SightlineError as error:
            if isinstance(error, PromptTooLong):
                chat.truncations.append(RolloutTruncated(error.problem, error.fix))
            chat.record_refusal(error)
            return OpenAIErrorResponse.of(error, dialect)
        except ClientDisconnect:
            return ROLLOUT_OVER  # nobody receives it
        try:
            max_tokens = request.most_tokens or chat.max_tokens
            with _cancelled_when_gone(http):
                return request, await chat.answer(
                    messages, request.offered_tools, max_tokens, request.stops, request.n or 1
                )
        except SightlineError as error:
            refusal = OpenAIErrorResponse.of(error, dialect)
            if refusal.status == 500:
                # The agent may continue, but the rollout must not train.
                chat.failures.append(error)
            elif isinstance(error, EngineError | RolloutTruncated):
                chat.record_refusal(error)
            return refusal
        except Exception as error:  # answer the agent, and fail the rollout
            chat.failures.append(
                EnvironmentFailed(
                    f"an agent's request failed: {traceback.format_exc()}",
                    "this is a bug in Sightline. Report it",
                )
            )
            return OpenAIErrorResponse(500, type(error).__name__, f"{error}")


def _refuse(path: str, error: SightlineError) -> Response:
    return OpenAIErrorResponse.of(error, ChatDialect()).to_response()


def _read_request(
    session: _AgentSession, dialect: ChatDialect, body: list[bytes]
) -> tuple[ChatRequest, list[Message]]:
    """Parse the body, free it, and store its images. Call this in a thread."""
    data = b"".join(body)
    body.clear()
    chat = session.chat
    request = read_chat_request(
        data, ROLLOUT_UNSUPPORTED, chat.max_model_len, dialect, session.find_past
    )
    del data
    messages = chat.renderer.read_messages(request.messages, session)
    request.messages = []
    return request, messages


async def _run_until_over(session: _AgentSession, work: Coroutine[Any, Any, _Reply]) -> _Reply:
    """Run `work` until it is done, the rollout ends, or the agent disconnects."""
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
    """Cancel this task if its agent disconnects, because nobody would receive the answer."""
    task = asyncio.current_task()
    assert task is not None
    disconnect = asyncio.ensure_future(http.receive())  # nothing else follows a body
    disconnect.add_done_callback(lambda ended: ended.cancelled() or task.cancel())
    try:
        yield
    finally:
        disconnect.cancel()


def _build_completion(
    trace_id: str, request: ChatRequest, turns: list[CompletedTurn]
) -> dict[str, Any]:
    choices = []
    for node, message in ((turn.node, turn.message) for turn in turns):
        call_ids = [make_call_id(node.id, k) for k in range(len(message.tool_calls))]
        choices.append(build_choice(message, call_ids, stopped=node.finish_reason == "stop"))
    first = turns[0]
    return build_completion(
        f"chatcmpl-{trace_id}-{first.node.id}",
        request.model or MODEL_NAME,
        choices,
        first.num_prompt_tokens,
        first.num_cached_tokens,
        sum(turn.node.num_sampled for turn in turns),
    )
