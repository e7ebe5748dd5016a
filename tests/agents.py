"""Agents with the real OpenAI SDK, the worker that serves them, and a record of its requests."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from openai import AsyncOpenAI
from PIL import Image
from scripted_policy import ScriptedPolicy

from sightline.envs import Chat, Environment, Task
from sightline.families import load_family, load_renderer
from sightline.media import ImageIngestor, MediaRef, MediaStore
from sightline.message import Message, ToolCall, text, user
from sightline.render import Renderer
from sightline.rollout.chat_sources import PolicyChats
from sightline.rollout.client import GenerateClient
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace, decode_trace, encode_trace
from sightline.wire.control import RolloutRequest
from sightline.wire.generate import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    SightlineFields,
    TokenLogprob,
    VersionSpan,
)

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"x": {"type": "number"}}},
    },
}
MAX_TOKENS = 6

Rollout = Callable[[Chat], Awaitable[Any]]


class Plays(Environment):
    """An environment that is one function."""

    name = "plays"

    def __init__(self, rollout: Rollout) -> None:
        self._play = rollout

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)

    async def rollout(self, task: Task, chat: Chat) -> Any:
        return await self._play(chat)


class CountingStore(MediaStore):
    """Counts the images that are validated, hashed and written."""

    num_put = 0

    def put(self, source: Any) -> MediaRef:
        self.num_put += 1
        return super().put(source)


@dataclass
class Seen:
    """The generate requests and answers that were sent, in the order of the answers."""

    calls: list[tuple[GenerateRequest, GenerateResponse]] = field(default_factory=list)

    def check(self, trace: Trace) -> None:
        """Check that the prompts and answers at the server are the paths of the trace."""
        requests = sorted(
            (
                request.token_ids + answer.choices[0].token_ids,
                [(s.offset, s.length, s.item.ref.digest) for s in request.slots()],
                [] if answer.sightline is None else answer.sightline.pixel_digests,
            )
            for request, answer in self.calls
        )
        unmatched = []
        for node in trace.turns:
            path = trace.path(node.id)
            slots = [(s.offset, s.length, s.item.ref.digest) for s in trace.slots(path)]
            unmatched.append((trace.tokens(path), slots, trace.pixel_digests(path)))
        assert requests == sorted(unmatched)


@asynccontextmanager
async def wire_to(server: str, recorder: Seen) -> AsyncIterator[str]:
    """An address that forwards all requests to `server` and records them."""
    async with aiohttp.ClientSession() as session:

        async def pass_on(http: web.Request) -> web.Response:
            body = await http.read()
            headers = {"content-type": http.content_type}
            async with session.request(
                http.method, server + http.path, data=body, headers=headers
            ) as answer:
                reply = await answer.read()
                if http.path == "/inference/v1/generate" and answer.status == 200:
                    recorder.calls.append(
                        (
                            msgspec.json.decode(body, type=GenerateRequest),
                            msgspec.json.decode(reply, type=GenerateResponse),
                        )
                    )
                return web.Response(body=reply, status=answer.status)

        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", pass_on)
        async with listening(app) as address:
            yield address


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


class Says(ScriptedPolicy):
    """A policy that returns given tokens, one answer after another."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._answers: Iterator[Sequence[int]] = iter(answers)

    def answer(self, request: GenerateRequest, digests: list[str]) -> GenerateResponse:
        answers = list(next(self._answers))
        stopped = answers[-1] in request.sampling_params.stop_token_ids
        choice = Choice(
            index=0,
            token_ids=answers,
            finish_reason="stop" if stopped else "length",
            logprobs=Logprobs([TokenLogprob(token, -1.0) for token in answers]),
            weight_versions=[VersionSpan("0", 0, len(answers))],
        )
        return GenerateResponse(request.request_id, [choice], SightlineFields(digests))


def spelled(renderer: Renderer, message: Message) -> list[int]:
    """Return the tokens that an assistant samples for a message, including the stop token."""
    rendered = renderer.render([user("?"), message], generation_prompt=False)
    (sampled_span,) = rendered.trained
    return rendered.token_ids[sampled_span.start : sampled_span.stop]


def calls(*arguments: str, content: str = "", reasoning: str | None = None) -> Message:
    """An assistant that calls `look`, once for each JSON text of arguments."""
    return Message(
        role="assistant",
        content=text(content),
        reasoning=reasoning,
        tool_calls=tuple(ToolCall("look", spelling) for spelling in arguments),
    )


@dataclass
class Worker:
    """Plays rollouts as a worker process does."""

    model: Path
    store: MediaStore
    server: str
    max_tokens: int = MAX_TOKENS
    timeout_s: float = 60.0
    max_turns: int = 0
    max_model_len: int = 0
    resolver: ImageIngestor | None = None
    """The resolver. By default it accepts only data: and media: URLs."""

    @contextmanager
    def player(self, rollout: Rollout | Environment) -> Iterator[RolloutPlayer]:
        resolver = self.resolver or ImageIngestor(self.store)
        family = load_family(self.model)
        chats = PolicyChats(
            renderer=load_renderer(self.model, self.store, family, resolver, self.max_model_len),
            store=self.store,
            client=GenerateClient(self.server, deadline_s=2.0),
            modality=family.modality,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            max_model_len=self.max_model_len,
            resolver=resolver,
        )
        env = rollout if isinstance(rollout, Environment) else Plays(rollout)
        yield RolloutPlayer(env, chats, self.timeout_s)

    async def play(
        self, rollout: Rollout | Environment, seed: int = 1, temperature: float = 1.0, **more: Any
    ) -> Trace:
        with self.player(rollout) as player:
            return await self.play_with(player, seed, temperature, **more)

    async def play_with(
        self, player: RolloutPlayer, seed: int = 1, temperature: float = 1.0, **more: Any
    ) -> Trace:
        try:
            played = await player.play(
                RolloutRequest("r1", "g", 0, "train", seed, temperature, **more)
            )
        finally:
            await player.close()
        return decode_trace(encode_trace(played.trace))


@asynccontextmanager
async def agent(chat: Chat) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
        yield client


def picture(number: int, width: int = 32, height: int = 32) -> Image.Image:
    """Return noise that is different for every number."""
    return Image.frombytes(
        "RGB", (width, height), random.Random(number).randbytes(3 * width * height)
    )


def picture_url(number: int, width: int = 32, height: int = 32) -> str:
    file = io.BytesIO()
    picture(number, width, height).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(number: int, words: str = "") -> dict[str, Any]:
    """Return a user message with its own picture."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": words or f"Look at {number}."},
            {"type": "image_url", "image_url": {"url": picture_url(number)}},
        ],
    }
