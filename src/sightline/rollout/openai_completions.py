"""OpenAI's chat completions, for the interception server and for inference servers.

Requests: fields that do not affect the answer are ignored. Fields that an endpoint does not support
are refused unless they have a neutral value.

Answers: one object, or a stream of chunks. The whole turn is sampled before the first chunk is
sent, so a stream cannot fail halfway. An answer is one chunk, and its finish reason another.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from sightline.errors import MessageError, PromptTooLong
from sightline.message import AssistantMessage, Message, to_openai_message
from sightline.render.protocol import Tools
from sightline.wire.codec import find_json_excess

_IGNORED = frozenset({
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store",
    "user", "verbosity",
})  # fmt: skip

FindPast = Callable[[str], list[Message]]
"""Returns the messages up to an earlier response, by its id."""

# Unsupported fields, each with a test for neutral values.
IsNeutral = Callable[[Any], bool]
SERVER_UNSUPPORTED: dict[str, IsNeutral] = {
    "audio": lambda value: False,
    "frequency_penalty": lambda value: value == 0,
    "function_call": lambda value: value in ("auto", "none"),
    "functions": lambda value: value == [],
    "logit_bias": lambda value: value == {},
    "modalities": lambda value: value == ["text"],
    "moderation": lambda value: False,
    "presence_penalty": lambda value: value == 0,
    "response_format": lambda value: value == {"type": "text"},
    "tool_choice": lambda value: value in ("auto", "none"),
    "top_logprobs": lambda value: value == 0,
    "web_search_options": lambda value: False,
}
# The trainer computes the distribution that the run's own settings describe.
ROLLOUT_UNSUPPORTED = SERVER_UNSUPPORTED | {
    "logprobs": lambda value: value is False,
    "min_p": lambda value: value == 0,
    "return_token_ids": lambda value: value is False,
    "stop_token_ids": lambda value: value == [],
    "top_k": lambda value: value in (0, -1),
    "top_p": lambda value: value == 1,
}
_FIX_SAMPLING = "leave it out: training needs the logprobs of the whole distribution"
_FIXES = {
    "function_call": "use tool_choice",
    "functions": "use tools",
    "min_p": _FIX_SAMPLING,
    "response_format": "describe the format in the messages, and parse the text",
    "tool_choice": "use auto or none, or offer only the tools that may be called",
    "top_k": _FIX_SAMPLING,
    "top_logprobs": "request those of the sampled tokens with logprobs = true",
    "top_p": _FIX_SAMPLING,
}
MAX_STOPS = 16

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
StopString = Annotated[str, msgspec.Meta(min_length=1)]
StopStrings = Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)]


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _Tools(msgspec.Struct):
    tools: list[_Tool] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """A request with every field checked except its messages."""

    messages: Annotated[list[Any], msgspec.Meta(min_length=1)]
    """Unchecked messages."""
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: StopString | StopStrings | None = None
    logprobs: bool | None = None
    n: AtLeastOne | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: tuple[int, ...] | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def most_tokens(self) -> int | None:
        """The maximum length of the answer, or None."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        """The strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()

    @property
    def offered_tools(self) -> Tools | None:
        """The tools that the model may call."""
        return None if self.tool_choice == "none" else self.tools or None


class ChatDialect:
    """The format of one request and its answer: here that of chat completions.

    Subclasses translate other formats to chat completions and back.
    """

    has_instructions = False
    """Whether the first message is the `instructions` of a response."""

    def to_chat(self, fields: dict[str, Any], find_past: FindPast) -> dict[str, Any]:
        """Return the fields of the request as those of a chat completion."""
        return fields

    def rename(self, path: str) -> str:
        """Return the request's own path for a path in the chat completion."""
        return path

    def to_answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        return completion

    def to_events(self, completion: dict[str, Any], include_usage: bool) -> Iterator[bytes]:
        """Yield the events of a stream, including the final `[DONE]`."""

        def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
            chunk = {**completion, "object": "chat.completion.chunk"}
            body = {**chunk, "choices": choices, "usage": usage}
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


def refuse_past(response_id: str) -> list[Message]:
    """Raise, for endpoints that store no responses."""
    raise MessageError.at(
        "previous_response_id",
        "this server stores no responses",
        "send the whole conversation as input",
    )


def read_chat_request(
    body: bytes,
    unsupported: Mapping[str, IsNeutral],
    max_model_len: int,
    dialect: ChatDialect,
    find_past: FindPast = refuse_past,
) -> ChatRequest:
    """Parse a request. Raise MessageError with the path of an invalid field.

    `max_model_len` = 0 means any length.
    """
    if excess := find_json_excess(body, max_model_len):
        raise MessageError(f"the body has {excess}", "send a window of the history")
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the body is not JSON: {error}", "send a JSON object") from error
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        raise MessageError(f"the body is a JSON {kind}", "send an object with messages")
    fields = {name: value for name, value in fields.items() if value is not None}
    fields = dialect.to_chat(fields, find_past)
    _check_fields(fields, unsupported)
    try:
        request = msgspec.convert({"messages": None, **fields}, ChatRequest)
        msgspec.convert({"tools": request.tools}, _Tools)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).removesuffix("`").partition(" - at `$.")
        fix = "pass a value as in OpenAI's API, or leave it out"
        raise MessageError.at(path, problem, fix) from error
    _check_num_parts(request.messages, max_model_len)
    return request


# msgspec analyzes a type when it first converts to it, and crashes if two threads do so at once.
_ANALYZED = [msgspec.json.Decoder(kind) for kind in (ChatRequest, _Tools)]


def _check_fields(fields: dict[str, Any], unsupported: Mapping[str, IsNeutral]) -> None:
    for name, value in fields.items():
        if value is None or name in _IGNORED:
            continue
        if name in unsupported and not unsupported[name](value):
            fix = _FIXES.get(name, "leave it out")
            raise MessageError.at(name, f"{reprlib.repr(value)} is not supported", fix)
        if name not in unsupported and name not in ChatRequest.__struct_fields__:
            raise MessageError.at(name, "this field is unknown", "leave it out")


def _check_num_parts(messages: list[Any], most: int) -> None:
    """Raise if there are more parts than tokens allowed. This runs before any part is read."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    if most and max(num, len(messages)) > most:
        raise PromptTooLong.at(
            "messages",
            f"{len(messages)} messages of {num} parts. A prompt has at most {most} tokens",
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
