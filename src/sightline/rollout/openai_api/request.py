"""Reads a chat completion request. Every field is supported, ignored or refused.

An endpoint's `FieldRules` decide. Fields that do not change the answer are ignored. The others are
refused unless they have a neutral value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sightline.errors import MessageError, PromptTooLong
from sightline.media import MediaRef
from sightline.message import IMAGE_KINDS, VIDEO_KINDS, get_image_source
from sightline.render.protocol import Tools
from sightline.wire.codec import find_json_excess

SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
_IGNORED_ALWAYS = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
})  # fmt: skip
_COMMON_FIELDS = frozenset({
    "model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream",
    "stream_options",
})  # fmt: skip


ResolveUrl = Callable[[str, str], MediaRef]
"""Takes a URL and its JSON path, which errors name, and returns the ref."""


@dataclass(frozen=True, slots=True)
class FieldRules:
    """How an endpoint treats fields that not every endpoint supports."""

    accepted: frozenset[str]
    """Fields that the endpoint reads itself, from `ChatRequest.extra`."""
    ignored: frozenset[str]
    refusal_reason: str
    """The error about a field that is not supported."""


ROLLOUT_RULES = FieldRules(
    # The run decides the sampling parameters, because its trainer computes the same distribution.
    accepted=frozenset(),
    ignored=_IGNORED_ALWAYS | SAMPLING,
    refusal_reason="is not supported while a policy is trained",
)
SERVER_RULES = FieldRules(
    accepted=SAMPLING
    | {"n", "logprobs", "tool_choice", "stop_token_ids", "banned_token_ids", "return_token_ids"},
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
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise MessageError.at("messages", "missing, empty or not a list", "pass the conversation")
    _check_num_parts(messages, max_model_len)
    options = request.get("stream_options") or {}
    if not isinstance(options, dict):
        raise MessageError.at("stream_options", "not an object", 'pass {"include_usage": true}')
    return ChatRequest(
        model=_read_model(request),
        messages=messages,
        tools=_read_tools(request.get("tools")),
        max_tokens=_read_max_tokens(request),
        stream=_read_flag(request.get("stream"), "stream"),
        include_usage=_read_flag(options.get("include_usage"), "stream_options.include_usage"),
        extra={k: v for k, v in request.items() if k in rules.accepted and v is not None},
    )


def _check_fields(request: dict[str, Any], rules: FieldRules) -> None:
    taken = _COMMON_FIELDS | rules.accepted | rules.ignored
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
    """Raise if there are too many parts, before any is read: a part is at least one token."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    if most and max(num, len(messages)) > most:
        raise PromptTooLong.at(
            "messages",
            f"{len(messages)} messages of {num} parts; a prompt has at most {most} tokens",
            "send a window of the history",
        )


def _read_model(request: dict[str, Any]) -> str | None:
    model = request.get("model")
    if model is not None and not isinstance(model, str):
        raise MessageError.at("model", "not a string", "pass a name that /v1/models lists")
    return model or None


def _read_tools(tools: Any) -> Tools | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise MessageError.at("tools", "not a list", "pass a list of functions")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise MessageError.at(f"tools[{i}].type", "not a function", 'pass type "function"')
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError.at(
                f"tools[{i}].function", "no function with a name", "describe the function"
            )
    checked: Tools = tools
    return checked


def _read_max_tokens(request: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MessageError.at(name, f"{str(value)[:40]!r}", "request one token or more")
        return value
    return None


def _read_flag(value: Any, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise MessageError.at(name, "not a boolean", "pass true or false")
    return bool(value)


def resolve_images(messages: list[Any], take: ResolveUrl) -> list[Any]:
    """Return the messages with a ref for every URL of an image or video.

    Malformed parts stay as they are. The message parser refuses them with their path.
    """
    return [_resolve_message(message, take, f"messages[{i}]") for i, message in enumerate(messages)]


def _resolve_message(message: Any, take: ResolveUrl, path: str) -> Any:
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            _resolve_part(part, take, f"{path}.content[{k}]") for k, part in enumerate(content)
        ]
        message = {**message, "content": parts}
    # The role's newer name; templates know the older one.
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _resolve_part(part: Any, take: ResolveUrl, path: str) -> Any:
    if not isinstance(part, dict) or part.get("type") not in IMAGE_KINDS + VIDEO_KINDS:
        return part
    if part["type"] in IMAGE_KINDS:
        return {"type": "image", "ref": _resolve_ref(part, take, path)}
    if part.get("frames") is None:
        return {"type": "video", "ref": _resolve_ref(part, take, path, "video")}
    if not isinstance(part["frames"], list) or not all(isinstance(f, dict) for f in part["frames"]):
        return part
    frames = [
        {"ref": _resolve_ref(frame, take, f"{path}.frames[{k}]"), "seconds": frame.get("seconds")}
        for k, frame in enumerate(part["frames"])
    ]
    return {"type": "video", "frames": frames}


def _resolve_ref(part: Any, take: ResolveUrl, path: str, what: str = "image") -> MediaRef:
    source, where = get_image_source(part, path, what)
    return source if isinstance(source, MediaRef) else take(source, where)
