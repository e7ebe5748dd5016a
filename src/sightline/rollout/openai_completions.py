"""OpenAI's chat completions, for the interception server and for inference servers.

Requests: an endpoint's `FieldRules` decide which fields are supported, ignored or refused. Fields
that do not affect the answer are ignored. Others are refused unless they have a neutral value.

Answers: one object, or a stream of chunks. The whole turn is sampled before the first chunk is
sent, so a stream cannot fail halfway. An answer is one chunk, and its finish reason another.

Errors: a status, a message, the JSON path and a stable code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from sightline.errors import (
    EngineError,
    MediaError,
    MediaMissing,
    MessageError,
    PromptTooLong,
    RolloutTruncated,
    SightlineError,
    StoreFull,
    TurnLimitReached,
)
from sightline.message import AssistantMessage, to_openai_message
from sightline.render.protocol import Tools
from sightline.wire.codec import find_json_excess

SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
_IGNORED_ALWAYS = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Rules for request fields that only some endpoints support."""

    accepted: frozenset[str]
    """Fields that the endpoint reads from `ChatRequest.extra`."""
    ignored: frozenset[str]
    refusal_reason: str
    """Error message for an unsupported field, after the field's name."""


ROLLOUT_RULES = FieldRules(
    # The run sets the sampling parameters, because its trainer computes the same distribution.
    accepted=frozenset(),
    ignored=_IGNORED_ALWAYS | SAMPLING,
    refusal_reason="is not supported while a policy is trained",
)
SERVER_RULES = FieldRules(
    accepted=SAMPLING | {"n", "logprobs", "tool_choice", "stop_token_ids", "return_token_ids"},
    ignored=_IGNORED_ALWAYS,
    refusal_reason="is not supported by this server",
)

# Unsupported fields, each with a test for neutral values.
_NEUTRAL_VALUES: dict[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1 and not isinstance(value, bool),
    "stop": lambda value: value == [],
    "logit_bias": lambda value: value == {},
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "tool_choice": lambda value: value == "auto",
    "parallel_tool_calls": lambda value: value is True,
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
}
_FIXES = {
    "n": "send several requests: each answer is a separate turn",
    "stop": "let the model end its turn, or cap it with max_tokens",
    "top_logprobs": "request those of the sampled tokens with logprobs = true",
    "response_format": "describe the format in the messages, and parse the text",
    "tool_choice": "use auto, or offer only the tools that may be called",
}


NumTokens = Annotated[int, msgspec.Meta(ge=1)]


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _CommonFields(msgspec.Struct):
    """The fields that every endpoint supports."""

    messages: Annotated[list[Any], msgspec.Meta(min_length=1)]
    model: str | None = None
    tools: list[_Tool] | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request with every field checked except its messages."""

    model: str | None
    messages: list[Any]
    """Unchecked messages."""
    tools: Tools | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    extra: dict[str, Any]
    """Unchecked fields that only this endpoint supports, without nulls."""


def read_chat_request(
    body: bytes, rules: FieldRules = ROLLOUT_RULES, max_model_len: int = 0
) -> ChatRequest:
    """Parse a request; raise MessageError with the path of an invalid field.

    `max_model_len` = 0 means any length.
    """
    if excess := find_json_excess(body, max_model_len):
        raise MessageError(f"the body has {excess}", "send a window of the history")
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the body is not JSON: {error}", "send a JSON object") from error
    if not isinstance(request, dict):
        raise MessageError(
            f"the body is a JSON {type(request).__name__}", "send an object with messages"
        )
    _check_fields(request, rules)
    try:
        fields = msgspec.convert({"messages": None, **request}, _CommonFields)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).removesuffix("`").partition(" - at `$.")
        fix = "pass a value as in OpenAI's API, or leave it out"
        raise MessageError.at(path, problem, fix) from error
    _check_num_parts(fields.messages, max_model_len)
    return ChatRequest(
        model=fields.model or None,
        messages=fields.messages,
        tools=request.get("tools") or None,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        extra={k: v for k, v in request.items() if k in rules.accepted and v is not None},
    )


def _check_fields(request: dict[str, Any], rules: FieldRules) -> None:
    taken = {*_CommonFields.__struct_fields__, *rules.accepted, *rules.ignored}
    for name, value in request.items():
        if name in taken or value is None:
            continue
        neutral = _NEUTRAL_VALUES.get(name)
        if name == "tool_choice" and value == "none" and not request.get("tools"):
            continue
        if neutral is None:
            raise MessageError.at(name, "unknown field", "leave it out")
        if not neutral(value):
            raise MessageError.at(name, rules.refusal_reason, _FIXES.get(name, "leave it out"))


def _check_num_parts(messages: list[Any], most: int) -> None:
    """Raise if there are more parts than tokens allowed. This runs before any part is read."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    if most and max(num, len(messages)) > most:
        raise PromptTooLong.at(
            "messages",
            f"{len(messages)} messages of {num} parts; a prompt has at most {most} tokens",
            "send a window of the history",
        )


def build_choice(
    message: AssistantMessage,
    call_ids: Sequence[str],
    stopped: bool,
    logprobs: list[dict[str, Any]] | None = None,
    token_ids: list[int] | None = None,
) -> dict[str, Any]:
    """Return one of the answers to a request.

    `call_ids` are ids for its tool calls, for models that do not write ids. `stopped` is False if
    the answer was truncated. `logprobs` and `token_ids` are None if they were not requested.
    """
    choice: dict[str, Any] = {
        "message": to_openai_message(message, lambda ref: ref.url, call_ids) | {"refusal": None},
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": "length",
    }
    if stopped:
        choice["finish_reason"] = "tool_calls" if message.tool_calls else "stop"
    return choice if token_ids is None else choice | {"token_ids": token_ids}


def build_completion(
    name: str,
    model: str,
    choices: Sequence[dict[str, Any]],
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_sampled_tokens: int,
) -> dict[str, Any]:
    """Return the answer to one request. The engine found the cached tokens in its KV cache."""
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_sampled_tokens,
            "total_tokens": num_prompt_tokens + num_sampled_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        },
    }


def stream_events(completion: dict[str, Any], include_usage: bool) -> Iterator[bytes]:
    """Yield the events of a stream, including the final `[DONE]`."""

    def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body = {**completion, "object": "chat.completion.chunk", "choices": choices, "usage": usage}
        if not include_usage:
            del body["usage"]
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    for choice in completion["choices"]:
        delta = choice["message"]
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        yield event([{"index": choice["index"], "delta": delta, "finish_reason": None}])
        ending = {name: value for name, value in choice.items() if name != "message"}
        yield event([{**ending, "delta": {}}])
    if include_usage:
        yield event([], completion["usage"])
    yield b"data: [DONE]\n\n"


# The first match decides.
_ERROR_CODES: tuple[tuple[type[SightlineError], int, str], ...] = (
    (PromptTooLong, 400, "context_length_exceeded"),
    (MessageError, 400, "invalid_value"),
    (TurnLimitReached, 400, "max_turns_reached"),
    (RolloutTruncated, 400, "context_length_exceeded"),
    (MediaMissing, 404, "media_missing"),
    (StoreFull, 507, "store_full"),
    (MediaError, 422, "media_refused"),
)
_ENGINE_CODES = {"too_long": "context_length_exceeded"}


@dataclass(frozen=True, slots=True)
class OpenAIErrorResponse:
    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: SightlineError) -> OpenAIErrorResponse:
        message, param = f"{error.short_problem}\n  fix: {error.fix}", error.path or None
        if isinstance(error, EngineError):
            code = _ENGINE_CODES.get(error.kind, error.kind)
            return cls(error.status, code, message, param if error.status < 500 else None)
        for kind, status, code in _ERROR_CODES:
            if isinstance(error, kind):
                return cls(status, code, message, param)
        return cls(500, type(error).__name__, message)

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Tell SDKs not to retry, except after a 503."""
        return {"retry-after": "1"} if self.status == 503 else {"x-should-retry": "false"}


UNKNOWN_KEY = OpenAIErrorResponse(
    401, "invalid_api_key", "no running rollout has this key\n  fix: pass chat.api_key as api_key"
)
ROLLOUT_OVER = OpenAIErrorResponse(401, "rollout_over", "the rollout of this key is over")
NO_SUCH_ROUTE = OpenAIErrorResponse(
    404, "unknown_url", "only /v1/chat/completions and /v1/models are served here"
)
