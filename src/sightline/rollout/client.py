"""The client of the generate protocol: sends references, receives tokens, and retries."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from sightline.compute.weight_transport import load_transport
from sightline.errors import EngineError
from sightline.transport.http_client import RequestCounts, RetryingClient
from sightline.wire.codec import check_release
from sightline.wire.generate import (
    AdoptRequest,
    ErrorAnswer,
    GenerateRequest,
    GenerateResponse,
    LeaseRequest,
    check_answer,
    decode_answer,
)
from sightline.wire.weights import read_manifest


class LoopPacer:
    """Limits an event loop to one rollout's work per iteration, first come, first served.

    An event loop runs everything that is ready before it looks at its timers. If 200 rollouts get
    their answers at once, each with a millisecond of work, nothing else happens for 0.2 seconds.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait_for_pass(self) -> None:
        """Wait for an iteration of the loop that no other waiter shares."""
        async with self._lock:
            await asyncio.sleep(0)


@dataclass
class GenerateClient(RetryingClient):
    """The client of one server. A generation that is running has no time limit."""

    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Our processor settings, which errors show next to the server's."""
    unreachable_fix: str = field(
        default="look at the inference server's log (logs/server.log if the run started it), and "
        "restart it",
        kw_only=True,
    )
    vocab_size: int = field(default=0, kw_only=True)
    """Upper bound of the ids in answers; 0 if unknown."""
    banned_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    """Ids that no answer may contain: the renderer's pads."""
    max_model_len: int = field(default=0, kw_only=True)
    """Maximum length of prompt and answer; 0 if unknown."""
    pacer: LoopPacer = field(default_factory=LoopPacer, kw_only=True)
    """Shared by the clients of all servers, so that their work on the event loop takes turns."""

    def for_server(self, base_url: str, token: str) -> Self:
        """Return a client of one of many servers, with its own counts. It does not retry, because
        the router may choose another server."""
        return replace(self, base_url=base_url, token=token, max_tries=1, counts=RequestCounts())

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Send a request, and return the checked answer."""
        if request.features is not None:
            self.counts.reference_bytes += sum(
                len(raw) for raws in request.features.kwargs_data.values() for raw in raws
            )
        body = msgspec.json.encode(request)
        answer = await self.request("POST", "/inference/v1/generate", body)
        await self.pacer.wait_for_pass()
        response = decode_answer(answer, GenerateResponse)
        check_answer(request, response, self.vocab_size, self.banned_token_ids, self.max_model_len)
        return response

    async def adopt(self, manifest: str) -> None:
        """Make the server adopt the weights of `manifest`, and return when it samples with them."""
        path = Path(manifest).absolute()  # the server may run in another folder
        content = read_manifest(path)
        sends = load_transport(content.transport).sends_manifest
        body = AdoptRequest(str(path), content if sends else None)
        await self.request("POST", "/sightline/v1/adopt", msgspec.json.encode(body))

    async def lease(self, run: str, seconds: float) -> None:
        """Let only `run` change the server's weights; raise if another run holds the lease."""
        body = msgspec.json.encode(LeaseRequest(run, seconds))
        await self.request("POST", "/sightline/v1/lease", body)

    async def wait_healthy(self) -> None:
        """Wait until the server answers; raise if it has another version of Sightline.

        The launcher ends the run if it never answers.
        """
        try:
            health = json.loads(await self.wait_reachable("/health"))
        except ValueError:
            health = {}
        if health == {"status": "ok"}:  # all that it returns without its token
            fix = "set [inference] token, or --token"
            problem = f"the server at {self.base_url} requires another token"
            raise EngineError(problem, fix, "unauthorized", 401)
        check_release(str(health.get("release", "")), f"the server at {self.base_url}")

    def read_error(self, status: int, data: bytes) -> EngineError:
        try:
            body = msgspec.json.decode(data, type=ErrorAnswer).error
        except msgspec.MsgspecError:
            return super().read_error(status, data)
        problem = body.message
        if body.type == "fingerprint" and self.settings:
            problem += f"; ours: {json.dumps(self.settings, sort_keys=True)}"
        return EngineError(
            problem, body.fix or "see docs/serving_api.md", kind=body.type, status=status
        )
