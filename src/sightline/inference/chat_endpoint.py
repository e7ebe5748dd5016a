"""The OpenAI-compatible endpoint of an inference server, for every engine.

    POST /v1/chat/completions, /v1/responses
         --> images into the store --> render --> generate --> parse
    POST /v1/reward
         --> images into the store --> render --> a reward model's reward for the conversation
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
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sightline.errors import EngineError, MessageError, SightlineError, StoreFull
from sightline.inference.errors import answer_errors, read_body, to_engine_error
from sightline.render import Rendered, Renderer
from sightline.rollout.openai_completions import (
    SERVER_UNSUPPORTED,
    ChatDialect,
    ChatRequest,
    build_choice,
    build_completion,
    read_chat_request,
)
from sightline.rollout.openai_http import (
    DIALECTS,
    OpenAIErrorResponse,
    completion_response,
    models_response,
)
from sightline.rollout.stop_strings import read_answer
from sightline.transport.http_server import json_response
from sightline.wire.generate import Choice, GenerateRequest, GenerateResponse, SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "n")
"""Sampling parameters of a chat request. The request validator checks their bounds."""

GenerateFunction = Callable[[GenerateRequest, Request], Awaitable[GenerateResponse]]
"""Validates the request, samples, and cancels if the client disconnects."""


@dataclass(frozen=True)
class ChatEndpoint:
    renderer: Renderer
    """Puts the images of requests into the store, and renders the prompt."""
    modality: str
    model: str
    max_model_len: int

    def routes(self, generate: GenerateFunction) -> list[Route]:
        routes = [Route("/v1/models", self._models)]
        for path, kind in DIALECTS.items():
            routes.append(Route(path, partial(self._answer, kind, generate), methods=["POST"]))
        reward = answer_errors(partial(self._reward, generate), chat_error_response)
        return [*routes, Route("/v1/reward", reward, methods=["POST"])]

    async def _models(self, http: Request) -> Response:
        return models_response(self.model, max_model_len=self.max_model_len)

    async def _answer(
        self, kind: type[ChatDialect], generate: GenerateFunction, http: Request
    ) -> Response:
        dialect = kind()
        complete = partial(self._complete, dialect, generate)
        return await answer_errors(complete, partial(chat_error_response, dialect=dialect))(http)

    async def _complete(
        self, dialect: ChatDialect, generate: GenerateFunction, http: Request
    ) -> Response:
        body = await read_body(http)
        # In a thread: it decodes base64, writes files and tokenizes long texts.
        chat_request, rendered = await asyncio.to_thread(self._read_request, dialect, body)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        token_ids, slots, model = rendered.token_ids, rendered.slots, chat_request.model or None
        params = self._build_sampling_params(chat_request, len(token_ids))
        request = GenerateRequest.of(
            token_ids, slots, params, self.modality, request_id=name, model=model
        )
        response = await generate(request, http)
        answer = await asyncio.to_thread(self._build_response, chat_request, request, response)
        return completion_response(chat_request, answer, dialect)

    async def _reward(self, generate: GenerateFunction, http: Request) -> Response:
        body = await read_body(http)
        asked, rendered = await asyncio.to_thread(self._read_request, ChatDialect(), body, False)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=None, reward=True)
        request = GenerateRequest.of(
            rendered.token_ids, rendered.slots, params, self.modality, model=asked.model or None
        )
        response = await generate(request, http)
        assert response.sightline is not None
        reward = response.sightline.reward
        usage = {"prompt_tokens": len(rendered.token_ids)}
        return json_response({"model": asked.model or self.model, "reward": reward, "usage": usage})

    def _read_request(
        self, dialect: ChatDialect, body: bytes, is_answered: bool = True
    ) -> tuple[ChatRequest, Rendered]:
        asked = read_chat_request(body, SERVER_UNSUPPORTED, self.max_model_len, dialect)
        rendered = self.renderer.render(asked.messages, asked.offered_tools, is_answered)
        return asked, rendered

    def _build_sampling_params(self, asked: ChatRequest, num_prompt_tokens: int) -> SamplingParams:
        values = {name: getattr(asked, name) for name in SAMPLING}
        return SamplingParams(
            # Without a cap, an answer may fill the sequence.
            max_tokens=asked.most_tokens or max(1, self.max_model_len - num_prompt_tokens),
            stop_token_ids=(*self.renderer.stop_token_ids, *(asked.stop_token_ids or ())),
            logprobs=0 if asked.logprobs else None,
            **{name: value for name, value in values.items() if value is not None},
        )

    def _build_response(
        self, chat_request: ChatRequest, request: GenerateRequest, response: GenerateResponse
    ) -> dict[str, Any]:
        choices = [self._build_choice(choice, chat_request) for choice in response.choices]
        reported = response.sightline
        completion = build_completion(
            request.request_id,
            chat_request.model or self.model,
            [choice for choice, _ in choices],
            num_prompt_tokens=len(request.token_ids),
            num_cached_tokens=reported.cached_tokens if reported is not None else 0,
            num_sampled_tokens=sum(num_tokens for _, num_tokens in choices),
        )
        if not chat_request.return_token_ids:
            return completion
        return completion | {"prompt_token_ids": request.token_ids}

    def _build_choice(
        self, choice: Choice, chat_request: ChatRequest
    ) -> tuple[dict[str, Any], int]:
        """Return a choice and its number of tokens."""
        message, end = read_answer(
            self.renderer, choice.token_ids, chat_request.offered_tools, chat_request.stops
        )
        token_ids = choice.token_ids[:end]
        entries = None if choice.logprobs is None else choice.logprobs.content[:end]
        built = build_choice(
            message,
            call_ids=[f"call_{secrets.token_hex(12)}" for _ in message.tool_calls],
            stopped=end is not None or choice.finish_reason == "stop",
            logprobs=None if entries is None else [self._spell_logprob(e) for e in entries],
            token_ids=token_ids if chat_request.return_token_ids else None,
        )
        return built, len(token_ids)

    def _spell_logprob(self, entry: Any) -> dict[str, Any]:
        text = self.renderer.decode([entry.token_id])
        # A token may hold a part of a character, whose bytes the text does not have.
        spelled = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": entry.logprob, "bytes": spelled, "top_logprobs": []}


def chat_error_response(error: SightlineError, dialect: ChatDialect | None = None) -> Response:
    """Return an error in OpenAI's format, with the field names of OpenAI's API."""
    if not isinstance(error, (MessageError, StoreFull)):  # these have their own codes
        refusal = to_engine_error(error)
        problem = refusal.problem.removeprefix("sampling_params.")
        if problem.startswith("token_ids:"):
            problem = "messages" + problem.removeprefix("token_ids")
        error = EngineError(problem, refusal.fix, refusal.kind, refusal.status)
    return OpenAIErrorResponse.of(error, dialect or ChatDialect()).to_response()
