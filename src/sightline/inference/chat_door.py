"""The OpenAI-compatible door of an inference server, whichever engine is behind it.

    POST /v1/chat/completions --> images into the store --> render --> generate --> parse
    GET  /v1/models

Prompts are made and answers read by the family's renderer, and images become references here: the
engine gets the request that a rollout would send, and its own template and processor never run.
A conversation comes whole with every request, so it is rendered whole.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sightline.errors import EngineError, MessageError, SightlineError, StoreFull
from sightline.inference.body import read_body
from sightline.inference.errors import typed
from sightline.message import Door
from sightline.render import Rendered, Renderer
from sightline.rollout.dialect.answer import Answer, Said, chunks, completion
from sightline.rollout.dialect.asked import OF_A_SERVER, Asked, read_asked
from sightline.rollout.dialect.images import take_images
from sightline.rollout.dialect.refusal import Refusal
from sightline.wire.generate import Choice, GenerateRequest, GenerateResponse, SamplingParams

CLIENT_CLOSED = 499

Generate = Callable[[GenerateRequest, Request], Awaitable[GenerateResponse]]
"""The engine's own path: checks the request, samples, and gives up when the client has gone."""


@dataclass(frozen=True)
class ChatDoor:
    renderer: Renderer
    images: Door
    """Takes the images of requests into the store."""
    modality: str
    model: str
    """The name of the served checkpoint."""
    max_len: int
    max_body_bytes: int

    def routes(self, generate: Generate) -> list[Route]:
        async def complete(http: Request) -> Response:
            try:
                return await self._complete(http, generate)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except SightlineError as error:
                return _refused(error)
            except Exception as error:  # a server's door: a bug costs one request
                traceback.print_exc()
                return _refused(typed(error))

        return [
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/models", self._models),
        ]

    async def _models(self, http: Request) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "sightline"}
        return _json({"object": "list", "data": [{**model, "max_model_len": self.max_len}]})

    async def _complete(self, http: Request, generate: Generate) -> Response:
        body = await read_body(http, self.max_body_bytes)
        # In threads: base64 is decoded, files are written and long texts tokenized.
        asked, rendered = await asyncio.to_thread(self._read, body)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        request = GenerateRequest.of(
            rendered.token_ids,
            rendered.slots,
            self._params(asked, len(rendered.token_ids)),
            self.modality,
            request_id=name,
            model=asked.model,
        )
        response = await generate(request, http)
        answer = await asyncio.to_thread(self._answer, asked, request, response)
        if not asked.stream:
            return _json(completion(answer))
        return StreamingResponse(
            (chunk for chunk in chunks(answer, asked.include_usage)),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    def _read(self, body: bytes) -> tuple[Asked, Rendered]:
        asked = read_asked(body, OF_A_SERVER)
        messages = take_images(asked.messages, self.images.resolve)
        tools = None if _choice_of_tools(asked) == "none" else asked.tools
        return asked, self.renderer.render(messages, tools)

    def _params(self, asked: Asked, num_prompt: int) -> SamplingParams:
        more = asked.more
        most = asked.max_tokens
        given = {
            name: _number(more[name], name)
            for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n")
            if name in more
        }
        return SamplingParams(
            # Without a cap an answer may fill its row; a prompt that leaves no room is refused.
            max_tokens=most if most is not None else max(1, self.max_len - num_prompt),
            stop_token_ids=(*self.renderer.stop_token_ids, *_ids(more.get("stop_token_ids", []))),
            logprobs=0 if _flag(more, "logprobs") else None,
            **given,
        )

    def _answer(self, asked: Asked, request: GenerateRequest, response: GenerateResponse) -> Answer:
        with_ids = _flag(asked.more, "return_token_ids")
        told = response.sightline
        return Answer(
            name=request.request_id,
            model=asked.model or self.model,
            created=int(time.time()),
            choices=[self._said(choice, with_ids) for choice in response.choices],
            num_prompt=len(request.token_ids),
            num_cached=told.cached_tokens if told is not None else 0,
            prompt_token_ids=request.token_ids if with_ids else None,
        )

    def _said(self, choice: Choice, with_ids: bool) -> Said:
        message = self.renderer.parse(choice.token_ids)
        entries = None if choice.logprobs is None else choice.logprobs.content
        return Said(
            message,
            call_ids=[f"call_{secrets.token_hex(12)}" for _ in message.tool_calls],
            stopped=choice.finish_reason == "stop",
            num_tokens=len(choice.token_ids),
            logprobs=None if entries is None else [self._spelled(e) for e in entries],
            token_ids=choice.token_ids if with_ids else None,
        )

    def _spelled(self, entry: Any) -> dict[str, Any]:
        text = self.renderer.decode([entry.token_id])
        return {
            "token": text,
            "logprob": entry.logprob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }


def _choice_of_tools(asked: Asked) -> str:
    choice = asked.more.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise MessageError.at(
            "tool_choice",
            "only auto and none can be honoured",
            "use auto, or offer only the tools that may be called",
        )
    return str(choice)


def _number(value: Any, name: str) -> Any:
    """As it came, if it is a number; its bounds are the engine's door's business."""
    kinds = (int, float) if name in ("temperature", "top_p", "min_p") else (int,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise MessageError.at(name, f"a {type(value).__name__}", "pass a number, or leave it out")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise MessageError.at("stop_token_ids", "not a list of token ids", "pass a list")
    return tuple(value)


def _flag(more: dict[str, Any], name: str) -> bool:
    value = more.get(name, False)
    if not isinstance(value, bool):
        raise MessageError.at(name, "not a boolean", "pass true or false")
    return value


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _in_their_words(error: EngineError) -> EngineError:
    """Fields of the generate request by the names that they have in this dialect."""
    problem = error.problem.removeprefix("sampling_params.")
    if problem.startswith("token_ids:"):
        problem = "messages" + problem.removeprefix("token_ids")
    return EngineError(problem, error.fix, error.kind, error.status)


def _refused(error: SightlineError) -> Response:
    # Messages have a code of their own in this dialect; everything else has the protocol's.
    own = isinstance(error, (MessageError, StoreFull))
    refusal = Refusal.of(error if own else _in_their_words(typed(error)))
    return Response(
        msgspec.json.encode(refusal.body),
        refusal.status,
        refusal.headers,
        media_type="application/json",
    )
