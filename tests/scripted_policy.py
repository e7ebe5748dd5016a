"""A policy without a model: it speaks the generate protocol and counts the bytes of its requests.

It checks requests as a server does and answers with random text. It reads no images: it derives
the pixel digests from the items' keys.
"""

from __future__ import annotations

import hashlib
import random

import msgspec
from aiohttp import web

from sightline.wire.codec import get_release
from sightline.wire.generate import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    LeaseRequest,
    Logprobs,
    SamplingParams,
    SightlineFields,
    TokenLogprob,
    VersionSpan,
)
from sightline.wire.weights import Manifest

MAX_REQUEST_BYTES = 1 << 30
NUM_TEXT_IDS = 94
"""The first ids of a byte-level tokenizer are the printable characters of ASCII."""
LOGPROB = -4.5
ENCODED_IMAGES = (b"data:image", b"\x89PNG\r\n\x1a\n", b"iVBORw0KGgo")
"""A data URL, a PNG file, and the latter in base64."""

_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(GenerateRequest)


class PolicyCounts(msgspec.Struct):
    """Bytes of HTTP bodies, by what they held."""

    requests: int = 0
    received_bytes: int = 0
    id_bytes: int = 0
    """Bytes of `received_bytes` that are ids of prompts."""
    reference_bytes: int = 0
    """Bytes of `received_bytes` that name and place images."""
    slots: int = 0
    longest_prompt: int = 0
    sent_bytes: int = 0
    digest_bytes: int = 0
    """Bytes of `sent_bytes` that are pixel digests, one for each image of the prompt."""
    encoded_images: int = 0
    """Encoded images in requests. There must be none."""


def count_encoded_images(data: bytes) -> int:
    return sum(data.count(mark) for mark in ENCODED_IMAGES)


class ScriptedPolicy:
    def __init__(self) -> None:
        self.counts = PolicyCounts()
        self.label = Manifest(version=0, vision_version=0, files=[]).label

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/sightline/v1/adopt", self._adopt)
        app.router.add_post("/sightline/v1/lease", self._lease)
        app.router.add_get("/sightline/v1/stats", self._stats)
        app.router.add_get("/health", self._health)
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.read()
        request = _requests.decode(body)
        slots = request.slots()
        self._count(body, request)
        digests = [
            hashlib.blake2b(slot.item.key.encode(), digest_size=16).hexdigest() for slot in slots
        ]
        answer = _encoder.encode(self.answer(request, digests))
        self.counts.sent_bytes += len(answer)
        self.counts.digest_bytes += len(_encoder.encode(digests))
        return web.Response(body=answer, content_type="application/json")

    def answer(self, request: GenerateRequest, digests: list[str]) -> GenerateResponse:
        """Return random text, seeded by the request. Other policies override this."""
        params = request.sampling_params
        rng = random.Random(params.seed)
        choices = [self._draw(index, params, rng) for index in range(params.n)]
        return GenerateResponse(request.request_id, choices, SightlineFields(digests))

    def _draw(self, index: int, params: SamplingParams, rng: random.Random) -> Choice:
        sampled = [rng.randrange(NUM_TEXT_IDS) for _ in range(params.max_tokens)]
        if params.stop_token_ids:
            sampled[-1] = params.stop_token_ids[0]
        return Choice(
            index=index,
            token_ids=sampled,
            finish_reason="stop" if params.stop_token_ids else "length",
            logprobs=Logprobs([TokenLogprob(token, LOGPROB) for token in sampled]),
            weight_versions=[VersionSpan(self.label, 0, len(sampled))],
        )

    def _count(self, body: bytes, request: GenerateRequest) -> None:
        counts = self.counts
        counts.requests += 1
        counts.received_bytes += len(body)
        without_ids = msgspec.structs.replace(request, token_ids=[])
        counts.id_bytes += len(body) - len(_encoder.encode(without_ids)) + len("[]")
        counts.longest_prompt = max(counts.longest_prompt, len(request.token_ids))
        counts.encoded_images += count_encoded_images(body)
        if request.features is not None:
            counts.reference_bytes += len(_encoder.encode(request.features))
            counts.slots += sum(map(len, request.features.kwargs_data.values()))

    async def _adopt(self, http: web.Request) -> web.Response:
        return web.json_response({})

    async def _lease(self, http: web.Request) -> web.Response:
        """Lease the server to that run."""
        run = msgspec.json.decode(await http.read(), type=LeaseRequest).run
        self.label = Manifest(version=0, vision_version=0, files=[], run=run).label
        return web.json_response({})

    async def _stats(self, http: web.Request) -> web.Response:
        return web.json_response({"busy": []})

    async def _health(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "release": get_release()})
