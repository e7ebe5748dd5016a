"""A chat against a scripted policy that logs every request, over real HTTP."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from scripted_policy import ScriptedPolicy

from sightline.media import MediaStore
from sightline.render import Renderer
from sightline.rollout.chat import RolloutChat
from sightline.rollout.client import GenerateClient
from sightline.trace import Node, Trace
from sightline.wire import Slot
from sightline.wire.generate import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    SightlineFields,
    TokenLogprob,
    VersionSpan,
)


@dataclass
class Line:
    """A model call as the server received it, and the answer."""

    prompt_ids: list[int]
    slots: list[Slot]
    seed: int | None
    completion: list[int]
    logprobs: list[float]
    pixel_digests: list[str]

    def places(self) -> list[tuple[int, int, str]]:
        return [(slot.offset, slot.length, slot.item.ref.digest) for slot in self.slots]


@dataclass
class LoggingPolicy(ScriptedPolicy):
    """Says one of `sayings`, or a few tokens of them in disorder, by the seed of the request.

    No two calls have the same logprobs, so that a turn of a trace names its line of the log.
    """

    sayings: Sequence[Sequence[int]]
    disorder: float = 0.4
    """Probability that the tokens are in random order."""
    log: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def answer(self, request: GenerateRequest, digests: list[str]) -> GenerateResponse:
        rng = random.Random(request.sampling_params.seed)
        words = list(rng.choice(self.sayings))
        if rng.random() < self.disorder:
            rng.shuffle(words)
        words = words[: request.sampling_params.max_tokens]
        stops = request.sampling_params.stop_token_ids
        at = next((i for i, token in enumerate(words) if token in stops), None)
        words = words if at is None else words[: at + 1]
        is_full = len(words) == request.sampling_params.max_tokens
        logprobs = [-float(len(self.log) + 1) - i / 1024 for i in range(len(words))]
        self.log.append(
            Line(
                request.token_ids,
                request.slots(),
                request.sampling_params.seed,
                words,
                logprobs,
                digests,
            )
        )
        pairs = zip(words, logprobs, strict=True)
        choice = Choice(
            index=0,
            token_ids=words,
            finish_reason="stop" if at is not None else "length" if is_full else "abort",
            logprobs=Logprobs([TokenLogprob(*pair) for pair in pairs]),
            weight_versions=[VersionSpan("3", 0, len(words))],
        )
        return GenerateResponse(request.request_id, [choice], SightlineFields(digests))


def line_of(node: Node) -> int:
    """Return the index of the log entry that produced a turn."""
    return int(-node.logprobs.numpy()[0]) - 1


@asynccontextmanager
async def talking(
    policy: ScriptedPolicy,
    renderer: Renderer,
    store: MediaStore,
    modality: str = "image",
    max_tokens: int = 64,
) -> AsyncIterator[RolloutChat]:
    """Yield a chat with an empty trace, against `policy` on its own port."""
    runner = web.AppRunner(policy.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = GenerateClient(site.name)
    try:
        yield chat_to(client, renderer, store, modality, max_tokens)
    finally:
        await client.close()
        await runner.cleanup()


def chat_to(
    client: GenerateClient,
    renderer: Renderer,
    store: MediaStore,
    modality: str = "image",
    max_tokens: int = 64,
    temperature: float = 1.0,
) -> RolloutChat:
    return RolloutChat(
        trace=Trace(id="t", reward=1.0, temperature=temperature),
        renderer=renderer,
        store=store,
        pool=ThreadPoolExecutor(1),
        client=client,
        modality=modality,
        temperature=temperature,
        max_tokens=max_tokens,
        rng=random.Random(1),
        seed=1,
    )
