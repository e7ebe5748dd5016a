"""Speaks the generate protocol: references out, tokens back. Retries only what may heal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from sightline.compute.weight_transport import load_transport
from sightline.errors import EngineError
from sightline.rollout.pacer import LoopPacer
from sightline.run.stages import NO_STAGE, Stage
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


@dataclass
class GenerateClient(RetryingClient):
    """One for each server that a process asks; a generation that is under way has no time limit."""

    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """The processor settings of this side, to show beside the server's where they differ."""
    unreachable_fix: str = field(
        default="look at the log of the inference server (logs/server.log where the run started "
        "it), and start it again",
        kw_only=True,
    )
    vocab_size: int = field(default=0, kw_only=True)
    """Ids of answers are below it; 0 is not known."""
    banned_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    """Ids that no answer may have: the renderer's pads."""
    max_model_len: int = field(default=0, kw_only=True)
    """Longest sequence that the server takes, prompt and answer; 0 is not known."""
    pacer: LoopPacer = field(default_factory=LoopPacer, kw_only=True)
    """Shared by the clients of all servers: what they do on the event loop takes turns."""

    def for_server(self, base_url: str, token: str) -> Self:
        """A client of one server among many, with counts of its own and this one's pacer. It asks
        once: the next try may go elsewhere."""
        return replace(self, base_url=base_url, token=token, max_tries=1, counts=RequestCounts())

    async def generate(self, request: GenerateRequest, turn: Stage = NO_STAGE) -> GenerateResponse:
        """`turn` is the stage that the request is a part of."""
        if request.features is not None:
            self.counts.reference_bytes += sum(
                len(raw) for raws in request.features.kwargs_data.values() for raw in raws
            )
        answer = await self._post_generate(msgspec.json.encode(request), turn)
        return self._check_answer(request, decode_answer(answer, GenerateResponse))

    def _check_answer(
        self, request: GenerateRequest, response: GenerateResponse
    ) -> GenerateResponse:
        ids = (self.vocab_size, self.banned_token_ids)
        check_answer(request, response, *ids, self.max_model_len)
        return response

    async def _post_generate(self, body: bytes, turn: Stage) -> bytes:
        with turn.begin("generate", server=self.base_url, request_bytes=len(body)) as stage:
            answer = await self.request(
                "POST",
                "/inference/v1/generate",
                body,
                stage.headers,
                lambda num_tries: stage.note(retries=num_tries),
            )
        await self.pacer.wait_for_pass()
        return answer

    async def adopt(self, manifest: str) -> None:
        """Returns when the server samples from the weights that `manifest` lists."""
        path = Path(manifest).absolute()  # the server may run in another folder
        content = read_manifest(path)
        sends = load_transport(content.transport).sends_manifest
        asked = AdoptRequest(str(path), content if sends else None)
        await self.request("POST", "/sightline/v1/adopt", msgspec.json.encode(asked))

    async def lease(self, run: str, seconds: float) -> None:
        """Lets `run` alone change the server's weights; raises where another may."""
        body = msgspec.json.encode(LeaseRequest(run, seconds))
        await self.request("POST", "/sightline/v1/lease", body)

    async def wait_healthy(self) -> None:
        """Returns when the server answers; the launcher ends the run if it never will. A server of
        another version is refused."""
        try:
            health = json.loads(await self.wait_reachable("/health"))
        except ValueError:
            health = {}
        if health == {"status": "ok"}:  # all that it tells who does not have its token
            fix = "give it with [inference] token, or --token"
            problem = f"the server at {self.base_url} has another token"
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
            problem, body.fix or "see docs/serving.md", kind=body.type, status=status
        )
