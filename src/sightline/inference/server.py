"""The HTTP server: it reads requests, waits for the engine and responds.

The event loop parses, validates and encodes. It never computes, decodes images or reads files.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sightline.errors import EngineError, MediaError, SightlineError
from sightline.inference.chat_endpoint import ChatEndpoint, chat_error_response
from sightline.inference.engine import Engine, EngineRequest
from sightline.inference.errors import (
    MAX_BODY_BYTES,
    answer_errors,
    build_engine_error,
    error_response,
    read_body,
)
from sightline.inference.validator import RequestValidator, ValidatedRequest
from sightline.inference.weight_fetcher import WeightFetcher
from sightline.transport.http_server import (
    GuardMiddleware,
    RequestGuard,
    json_response,
    read_bearer,
)
from sightline.wire import generate as wire
from sightline.wire.array import Array
from sightline.wire.generate import GenerateRequest, GenerateResponse, PromptLogprob
from sightline.wire.prometheus import CONTENT_TYPE, format_prometheus
from sightline.wire.weights import Manifest, resolve_manifest

Body = TypeVar("Body")


@dataclass(slots=True, eq=False)
class _PendingCall:
    """One HTTP request that waits for its choices."""

    requests: list[EngineRequest]
    num_unfinished: int
    finished: asyncio.Future[None]


@dataclass
class ServerLease:
    """A lease that lets one run change the server's weights until it expires."""

    run: str = ""
    until: float = 0.0
    """Expiry time of the lease, on the monotonic clock."""

    @property
    def holder(self) -> str:
        """The run that holds the lease. Empty for none."""
        return self.run if time.monotonic() < self.until else ""

    def take(self, request: wire.LeaseRequest) -> None:
        if self.holder not in ("", request.run):
            raise self._refusal(request.run)
        self.run = request.run if request.seconds else ""
        self.until = time.monotonic() + request.seconds

    def check(self, manifest: Manifest) -> None:
        """Raise unless the manifest's run took the last lease, or is empty and none is active."""
        run = manifest.run
        if run != self.run and (run or self.holder):
            raise self._refusal(run)

    def _refusal(self, run: str) -> EngineError:
        requester = f"run {run}" if run else "a manifest without a run"
        if not self.holder:
            problem = f"{requester} has no lease of this server"
            fix = "POST its id to /sightline/v1/lease first, and renew it before it expires"
            return build_engine_error("leased", problem, fix)
        left_s = math.ceil(self.until - time.monotonic())
        return build_engine_error(
            "leased",
            f"this server is leased to run {self.holder}, not to {requester}. The lease expires in "
            f"{left_s} s unless that run renews it",
            "end the other run (find it with `sightline ls --ids`), or use another server",
        )


@dataclass
class InferenceServer:
    engine: Engine
    validator: RequestValidator
    chat: ChatEndpoint
    identity: dict[str, Any]
    """Properties of the model that /health reports."""
    guard: RequestGuard
    weights_root: Path | None = None
    """The only folder from which weights are adopted."""
    fetcher: WeightFetcher | None = None
    """Downloads weights from the store."""
    lease: ServerLease = field(default_factory=lambda: ServerLease())

    def __post_init__(self) -> None:
        self._adopting = asyncio.Lock()
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", answer_errors(self._generate), methods=["POST"]),
                *self.chat.routes(self._generate_for_chat),
                Route("/sightline/v1/lease", answer_errors(self._lease), methods=["POST"]),
                Route("/sightline/v1/adopt", answer_errors(self._adopt), methods=["POST"]),
                Route("/sightline/v1/stats", answer_errors(self._stats)),
                Route("/health", answer_errors(self._health)),
                Route("/metrics", answer_errors(self._metrics)),
            ],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _answer_unserved},
            middleware=[Middleware(GuardMiddleware, guard=self.guard, respond=_respond)],
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(requests: list[EngineRequest]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._on_delivered, requests)

        self.engine.start(deliver)
        try:
            yield
        finally:
            self.engine.stop()
            await asyncio.to_thread(self.engine.join, 10.0)

    # --- generate

    async def _generate(self, http: Request) -> Response:
        most = min(MAX_BODY_BYTES, self.validator.max_body_bytes)
        checked = self.validator.check(await read_body(http, most))
        return json_response(await self._run_request(checked, http))

    async def _generate_for_chat(self, request: GenerateRequest, http: Request) -> GenerateResponse:
        """Run a request that the chat endpoint built for the client at `http`."""
        return await self._run_request(self.validator.check_request(request), http)

    async def _run_request(self, checked: ValidatedRequest, http: Request) -> GenerateResponse:
        requests = self.engine.build_requests(checked)
        finished = asyncio.get_running_loop().create_future()
        call = _PendingCall(requests, len(requests), finished)
        for request in requests:
            request.owner = call
            request.client = http.client.host if http.client else ""
        self.engine.submit(requests)
        # The body has been read, so the next message means that the client disconnected.
        disconnect = asyncio.ensure_future(http.receive())
        disconnect.add_done_callback(lambda task: None if task.cancelled() else self._cancel(call))
        try:
            await finished
        except asyncio.CancelledError:
            self._cancel(call)
            raise
        finally:
            disconnect.cancel()
        return build_response(checked, requests)

    def _on_delivered(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            call: _PendingCall = request.owner
            call.num_unfinished -= 1
            if call.num_unfinished == 0 and not call.finished.done():
                call.finished.set_result(None)

    def _cancel(self, call: _PendingCall) -> None:
        for request in call.requests:
            self.engine.cancel(request)

    # --- weights and metrics

    async def _lease(self, http: Request) -> Response:
        fix = "send the id of a run, and 0 to 3600 seconds"
        request = await self._read(http, wire.LeaseRequest, fix)
        self.lease.take(request)
        return json_response({"run": self.lease.holder, "seconds": request.seconds})

    async def _adopt(self, http: Request) -> Response:
        request = await self._read(http, wire.AdoptRequest, "send the path of a manifest")

        def adopt() -> Manifest:
            if request.content is not None:
                return self._adopt_from_store(request.content)
            path = resolve_manifest(request.manifest, self.weights_root)
            return self.engine.adopt(path, self.lease.check)

        async with self._adopting:
            manifest = await asyncio.to_thread(adopt)
        return json_response({"version": manifest.label, "vision_version": manifest.vision_version})

    def _adopt_from_store(self, manifest: Manifest) -> Manifest:
        self.lease.check(manifest)
        assert self.fetcher is not None
        try:
            path = self.fetcher.fetch(manifest)
        except SightlineError as error:
            # An unreachable store may recover. Missing or corrupt data will not.
            is_unreachable = type(error) is MediaError and isinstance(error.__cause__, OSError)
            kind = wire.WEIGHTS_UNAVAILABLE if is_unreachable else "weights"
            raise build_engine_error(kind, error.problem, error.fix) from error
        except OSError as error:
            fix = "free space on the server's disk, or repair it"
            raise build_engine_error(wire.WEIGHTS_UNAVAILABLE, str(error), fix) from error
        adopted = self.engine.adopt(path, self.lease.check)  # again: the fetch takes time
        self.fetcher.keep_only(path, manifest)
        return adopted

    async def _read(self, http: Request, kind: type[Body], fix: str) -> Body:
        body = await read_body(http)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise build_engine_error("schema", f"not a {kind.__name__}: {error}", fix) from error

    async def _stats(self, http: Request) -> Response:
        text = http.query_params.get("since", "0")
        try:
            since = float(text)
        except ValueError:
            problem = f"since: {text!r} is not a time"
            raise build_engine_error("schema", problem, "send seconds since 1970") from None
        return json_response(self.engine.stats(since))

    async def _health(self, http: Request) -> Response:
        guard, manifest = self.guard, self.engine.manifest
        if guard.token and not guard.is_token(read_bearer(http.headers)):
            return json_response({"status": "ok"})  # enough for a load balancer
        return json_response(
            {
                "status": "ok",
                **self.identity,
                "version": manifest.label,
                "vision_version": manifest.vision_version,
                "running": self.engine.num_running,
                "waiting": self.engine.num_waiting,
                "step_s": self.engine.step_s,
                "leased_to": self.lease.holder,
            }
        )

    async def _metrics(self, http: Request) -> Response:
        groups = (("counter", self.engine.totals()), ("gauge", self.engine.now()))
        text = format_prometheus(
            (kind, name, {}, value) for kind, values in groups for name, value in values.items()
        )
        return Response(text, media_type=CONTENT_TYPE)


async def _answer_unserved(http: Request, error: Exception) -> Response:
    """Return the error response for an unknown path or method."""
    is_method = isinstance(error, HTTPException) and error.status_code == 405
    kind = "method" if is_method else "unknown_url"
    problem = f"{http.method} {http.url.path[:80]!r} is not served here"
    fix = "POST /v1/chat/completions or /inference/v1/generate; docs/serving_api.md lists all paths"
    return _respond(http.url.path, build_engine_error(kind, problem, fix))


def _respond(path: str, error: SightlineError) -> Response:
    """Return the response for an error, in the format of the path."""
    return chat_error_response(error) if path.startswith("/v1/") else error_response(error)


def build_response(checked: ValidatedRequest, requests: list[EngineRequest]) -> GenerateResponse:
    for request in requests:
        if request.error is not None:
            raise request.error
        if request.finish_reason == "abort":
            raise ClientDisconnect
    first = requests[0]
    wants_logprobs = checked.params.logprobs is not None
    return GenerateResponse(
        request_id=checked.request_id,
        choices=[_build_choice(i, r, wants_logprobs) for i, r in enumerate(requests)],
        sightline=wire.SightlineFields(
            [first.digests[k] for k in first.keys], first.cached_tokens, first.reward
        ),
        prompt_logprobs=_build_prompt_logprobs(first),
    )


def _build_choice(index: int, request: EngineRequest, wants_logprobs: bool) -> wire.Choice:
    logprobs = None
    if wants_logprobs:
        pairs = zip(request.tokens, request.logprobs, strict=True)
        logprobs = wire.Logprobs([wire.TokenLogprob(token, value) for token, value in pairs])
    routes = request.routes
    array = None if routes is None else Array.of(routes, str(routes.dtype))
    return wire.Choice(index, request.tokens, request.finish_reason, logprobs, request.spans, array)


def _build_prompt_logprobs(request: EngineRequest) -> list[dict[int, PromptLogprob] | None] | None:
    """Return one entry per token; None if it has no finite logprob."""
    if request.prompt_logprobs is None:
        return None
    pairs = zip(request.prompt.tolist(), request.prompt_logprobs.tolist(), strict=True)
    return [{token: PromptLogprob(v)} if math.isfinite(v) else None for token, v in pairs]
