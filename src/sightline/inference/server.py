"""The HTTP side: reads requests, waits for the engine, answers.

The event loop decodes, checks and encodes; it never computes, decodes an image or reads a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sightline.errors import EngineError, SightlineError
from sightline.inference import metrics
from sightline.inference.body import read_body
from sightline.inference.chat_door import CLIENT_CLOSED, ChatDoor
from sightline.inference.door import Checked, Door
from sightline.inference.errors import answer, refusal, typed
from sightline.inference.scores import prompt_entries
from sightline.wire.exposition import CONTENT_TYPE
from sightline.wire.generate import (
    AdoptRequest,
    Choice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    SightlineAnswer,
    TokenLogprob,
    labels,
)
from sightline.wire.stage import NO_STAGES, Stage, Stages

if TYPE_CHECKING:
    from sightline.inference.engine import Engine, EngineRequest

JSON = "application/json"
WATCH_EVERY_S = 0.25

Make = Callable[[Checked], Sequence["EngineRequest"]]
Handler = Callable[[Request], Awaitable[Response]]


class _Call:
    """One HTTP request, and the choices of it that the engine still owes."""

    __slots__ = ("began", "http", "left", "requests", "whole")

    def __init__(self, http: Request, requests: Sequence[EngineRequest]) -> None:
        self.http = http
        self.requests = requests
        self.left = len(requests)
        self.began = time.monotonic()
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Server:
    def __init__(
        self,
        engine: Engine,
        door: Door,
        make: Make,
        chat: ChatDoor,
        identity: dict[str, Any],
        max_body_bytes: int,
        stages: Stages = NO_STAGES,
    ) -> None:
        """`make` turns a checked request into the engine's, one a choice; `identity` is what
        /health says about the model."""
        self.engine = engine
        self._door = door
        self._make = make
        self._identity = identity
        self._max_body_bytes = max_body_bytes
        self._stages = stages
        self._calls: set[_Call] = set()
        self._adopting = asyncio.Lock()
        self._adopt_decoder = msgspec.json.Decoder(AdoptRequest)
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", self._safely(self._generate), methods=["POST"]),
                *chat.routes(self._generate_for),
                Route("/sightline/v1/adopt", self._safely(self._adopt), methods=["POST"]),
                Route("/sightline/v1/stats", self._safely(self._stats)),
                Route("/health", self._safely(self._health)),
                Route("/metrics", self._safely(self._metrics)),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(requests: list[EngineRequest]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._delivered, requests)

        self.engine.start(deliver)
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            self.engine.stop()
            await asyncio.to_thread(self.engine.join, 10.0)
            await asyncio.to_thread(self._stages.close)

    def _safely(self, handler: Handler) -> Handler:
        async def handle(http: Request) -> Response:
            try:
                return await handler(http)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except SightlineError as error:
                return _refused(typed(error))
            except Exception as error:  # the server's door: a bug costs one request
                traceback.print_exc()
                return _refused(typed(error))

        return handle

    # --- generate

    async def _generate(self, http: Request) -> Response:
        with self._stages.begin("serve", http.headers) as stage:
            checked = self._door.check(await read_body(http, self._max_body_bytes))
            return _json(await self._answer(checked, http, stage))

    async def _generate_for(self, request: GenerateRequest, http: Request) -> GenerateResponse:
        """The same for a request that was made here, of which `http` waits for the answer."""
        with self._stages.begin("serve", http.headers) as stage:
            return await self._answer(self._door.check_request(request), http, stage)

    async def _answer(self, checked: Checked, http: Request, stage: Stage) -> GenerateResponse:
        call = _Call(http, self._make(checked))
        for request in call.requests:
            request.owner = call
        self.engine.submit(list(call.requests))
        self._calls.add(call)
        try:
            await call.whole
        except asyncio.CancelledError:
            self._cancel(call)
            raise
        finally:
            self._calls.discard(call)
            _tell(stage, checked, call.requests)
        return _answered(checked, call.requests)

    def _delivered(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            call: _Call = request.owner
            call.left -= 1
            if call.left == 0 and not call.whole.done():
                call.whole.set_result(None)

    async def _watch(self) -> None:
        """Cancels the requests of clients that have gone."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            old = time.monotonic() - WATCH_EVERY_S
            for call in [call for call in self._calls if call.began < old]:
                if await call.http.is_disconnected():
                    self._cancel(call)

    def _cancel(self, call: _Call) -> None:
        for request in call.requests:
            self.engine.cancel(request)

    # --- the rest

    async def _adopt(self, http: Request) -> Response:
        try:
            wanted = self._adopt_decoder.decode(await read_body(http, self._max_body_bytes))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise refusal("schema", f"not an adopt request: {error}", "send manifest") from error
        async with self._adopting:
            manifest = await asyncio.to_thread(self.engine.adopt, Path(wanted.manifest))
        return _json({"version": manifest.label, "vision_version": manifest.vision_version})

    async def _stats(self, http: Request) -> Response:
        text = http.query_params.get("since", "0")
        try:
            since = float(text)
        except ValueError:
            raise refusal("schema", f"since: {text!r}", "send seconds since 1970") from None
        return _json(metrics.stats(self.engine, since))

    async def _health(self, http: Request) -> Response:
        manifest = self.engine.manifest
        return _json(
            {
                "status": "ok",
                **self._identity,
                "version": manifest.label,
                "vision_version": manifest.vision_version,
                "running": self.engine.num_running,
                "waiting": self.engine.num_waiting,
            }
        )

    async def _metrics(self, http: Request) -> Response:
        return Response(metrics.prometheus(self.engine), media_type=CONTENT_TYPE)


def _tell(stage: Stage, checked: Checked, requests: Sequence[EngineRequest]) -> None:
    first = requests[0]
    stage.note(
        rollout_id=checked.request_id,
        prompt_tokens=len(checked.prompt),
        images=len(checked.slots),
        cached_tokens=first.cached_tokens,
        sampled_tokens=sum(len(request.tokens) for request in requests),
        policy_version=labels(first.spans),
    )
    for choice, request in enumerate(requests):
        for name, began, ended in request.passed.stages:
            stage.past(name, began, ended, choice=choice)


def _answered(checked: Checked, requests: Sequence[EngineRequest]) -> GenerateResponse:
    for request in requests:
        if request.error is not None:
            raise request.error
        if request.finish_reason == "abort":
            raise ClientDisconnect
    wants_logprobs = checked.params.logprobs is not None
    return GenerateResponse(
        request_id=checked.request_id,
        choices=[_choice(i, r, wants_logprobs) for i, r in enumerate(requests)],
        sightline=SightlineAnswer(
            pixel_digests=requests[0].pixel_digests(), cached_tokens=requests[0].cached_tokens
        ),
        prompt_logprobs=prompt_entries(requests[0].prompt, requests[0].prompt_logprobs),
    )


def _choice(index: int, request: EngineRequest, wants_logprobs: bool) -> Choice:
    logprobs = None
    if wants_logprobs:
        pairs = zip(request.tokens, request.logprobs, strict=True)
        logprobs = Logprobs([TokenLogprob(token, value) for token, value in pairs])
    return Choice(index, request.tokens, request.finish_reason, logprobs, request.spans)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _refused(error: EngineError) -> Response:
    status, body, headers = answer(error)
    return Response(body, status, headers, media_type=JSON)
