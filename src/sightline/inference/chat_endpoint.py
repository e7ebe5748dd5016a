"""The OpenAI-compatible endpoint of an inference server, for every engine.

    POST /v1/chat/completions --> images into the store --> render --> generate --> parse
    GET  /v1/models

The family's renderer builds prompts and parses answers. Images are stored and replaced by refs. The
engine gets the same request as from a rollout, and its own template and processor never run. Each
request carries its whole conversation, which is rendered in full.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sightline.errors import EngineError, MessageError, SightlineError, StoreFull
from sightline.inference.errors import (
    JSON,
    answer_errors,
    json_response,
    read_body,
    to_engine_error,
)
from sightline.render import Rendered, Renderer, Tools
from sightline.rollout.openai_completions import (
    SERVER_RULES,
    ChatRequest,
    OpenAIErrorResponse,
    build_choice,
    build_completion,
    read_chat_request,
    stream_events,
)
from sightline.wire.generate import Choice, GenerateRequest, GenerateResponse, SamplingParams

SAMPLING_TYPES: dict[str, type] = {
    "temperature": float, "top_p": float, "min_p": float, "top_k": int, "seed": int, "n": int,
}  # fmt: skip
"""Sampling parameters of a chat request. The request validator checks their bounds."""

TokenIds = tuple[int, ...]
GenerateFunction = Callable[[GenerateRequest, Request], Awaitable[GenerateResponse]]
"""Validates the request, samples, and cancels if the client disconnects."""


@dataclass(frozen=True)
class ChatEndpoint:
    renderer: Renderer
    """Puts the images of requests into the store, and renders the prompt."""
    modality: str
    model: str
    """Name of the served checkpoint."""
    max_model_len: int

    def routes(self, generate: GenerateFunction) -> list[Route]:
        handler = answer_errors(partial(self._complete, generate=generate), chat_error_response)
        return [
            Route("/v1/chat/completions", handler, methods=["POST"]),
            Route("/v1/models", self._models),
        ]

    async def _models(self, http: Request) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "sightline"}
        return json_response(
            {"object": "list", "data": [{**model, "max_model_len": self.max_model_len}]}
        )

    async def _complete(self, http: Request, generate: GenerateFunction) -> Response:
        body = await read_body(http)
        # In a thread: it decodes base64, writes files and tokenizes long texts.
        chat_request, rendered = await asyncio.to_thread(self._read_request, body)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        request = GenerateRequest.of(
            rendered.token_ids,
            rendered.slots,
            self._build_sampling_params(chat_request, len(rendered.token_ids)),
            self.modality,
            request_id=name,
            model=chat_request.model,
        )
        response = await generate(request, http)
        answer = await asyncio.to_thread(self._build_response, chat_request, request, response)
        if not chat_request.stream:
            return json_response(answer)
        return StreamingResponse(
            (chunk for chunk in stream_events(answer, chat_request.include_usage)),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    def _read_request(self, body: bytes) -> tuple[ChatRequest, Rendered]:
        chat_request = read_chat_request(body, SERVER_RULES, self.max_model_len)
        rendered = self.renderer.render(chat_request.messages, _get_tools(chat_request))
        return chat_request, rendered

    def _build_sampling_params(
        self, chat_request: ChatRequest, num_prompt_tokens: int
    ) -> SamplingParams:
        extra = chat_request.extra
        options = {
            name: _read_field(extra, name, kind)
            for name, kind in SAMPLING_TYPES.items()
            if name in extra
        }
        return SamplingParams(
            # Without a cap, an answer may fill the sequence.
            max_tokens=chat_request.max_tokens or max(1, self.max_model_len - num_prompt_tokens),
            stop_token_ids=(
                *self.renderer.stop_token_ids,
                *_read_field(extra, "stop_token_ids", TokenIds, ()),
            ),
            logprobs=0 if _read_field(extra, "logprobs", bool, False) else None,
            **options,
        )

    def _build_response(
        self, chat_request: ChatRequest, request: GenerateRequest, response: GenerateResponse
    ) -> dict[str, Any]:
        with_ids = _read_field(chat_request.extra, "return_token_ids", bool, False)
        tools, reported = _get_tools(chat_request), response.sightline
        completion = build_completion(
            request.request_id,
            chat_request.model or self.model,
            [self._build_choice(choice, with_ids, tools) for choice in response.choices],
            num_prompt_tokens=len(request.token_ids),
            num_cached_tokens=reported.cached_tokens if reported is not None else 0,
            num_sampled_tokens=sum(len(choice.token_ids) for choice in response.choices),
        )
        return completion | {"prompt_token_ids": request.token_ids} if with_ids else completion

    def _build_choice(self, choice: Choice, with_ids: bool, tools: Tools | None) -> dict[str, Any]:
        message = self.renderer.parse(choice.token_ids, tools)
        entries = None if choice.logprobs is None else choice.logprobs.content
        return build_choice(
            message,
            call_ids=[f"call_{secrets.token_hex(12)}" for _ in message.tool_calls],
            stopped=choice.finish_reason == "stop",
            logprobs=None if entries is None else [self._spell_logprob(e) for e in entries],
            token_ids=choice.token_ids if with_ids else None,
        )

    def _spell_logprob(self, entry: Any) -> dict[str, Any]:
        text = self.renderer.decode([entry.token_id])
        return {
            "token": text,
            "logprob": entry.logprob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }


def _get_tools(chat_request: ChatRequest) -> Tools | None:
    """Return the tools that the model may call."""
    choice = _read_field(chat_request.extra, "tool_choice", Literal["auto", "none"], "auto")
    return None if choice == "none" else chat_request.tools


def _read_field(extra: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """Return a field of a chat request; raise unless it is of `kind`."""
    try:
        return msgspec.convert(extra.get(name, default), kind)
    except msgspec.ValidationError as error:
        fix = "pass a supported value, or leave it out"
        raise MessageError.at(name, str(error), fix) from error


def _use_openai_field_names(error: EngineError) -> EngineError:
    """Return `error` with the field names of OpenAI's API."""
    problem = error.problem.removeprefix("sampling_params.")
    if problem.startswith("token_ids:"):
        problem = "messages" + problem.removeprefix("token_ids")
    return EngineError(problem, error.fix, error.kind, error.status)


def chat_error_response(error: SightlineError) -> Response:
    """Return an error in OpenAI's format."""
    if not isinstance(error, (MessageError, StoreFull)):  # these have their own codes
        error = _use_openai_field_names(to_engine_error(error))
    refusal = OpenAIErrorResponse.of(error)
    body = msgspec.json.encode(refusal.body)
    return Response(body, refusal.status, refusal.headers, media_type=JSON)
