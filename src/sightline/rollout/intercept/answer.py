"""An answer as OpenAI's SDKs read it: one object, or the chunks of a stream.

A turn is sampled whole and stands in the trace before its first chunk is sent: a stream can
neither fail half way nor be trained without having been said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sightline.rollout.chat import Answered
from sightline.trace.recognise import call_id

CHUNK_CHARS = 48
DONE = b"data: [DONE]\n\n"


def completion(answered: Answered, name: str, model: str, created: int) -> dict[str, Any]:
    said = answered.message
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None, "refusal": None}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = _calls(answered)
    else:
        # Null beside calls is the dialect's own way; elsewhere programs expect text.
        message["content"] = said.text
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason(answered),
        "logprobs": None,
    }
    return {
        "id": name,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(answered),
    }


def chunks(
    answered: Answered, name: str, model: str, created: int, include_usage: bool
) -> Iterator[bytes]:
    """The events of a stream, the last mark included."""
    head = {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}

    def event(choices: list[dict[str, Any]], used: dict[str, Any] | None) -> bytes:
        body: dict[str, Any] = {**head, "choices": choices}
        if include_usage:
            body["usage"] = used
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    for delta in _deltas(answered):
        yield event([{"index": 0, "delta": delta, "finish_reason": None}], None)
    ending = {"index": 0, "delta": {}, "finish_reason": finish_reason(answered)}
    yield event([ending], None)
    if include_usage:
        yield event([], usage(answered))
    yield DONE


def _deltas(answered: Answered) -> Iterator[dict[str, Any]]:
    said = answered.message
    yield {"role": "assistant", "content": None if said.tool_calls else ""}
    for piece in _pieces(said.reasoning or ""):
        yield {"reasoning_content": piece}
    for piece in _pieces(said.text):
        yield {"content": piece}
    for k, call in enumerate(_calls(answered)):
        arguments = call["function"].pop("arguments")
        call["function"]["arguments"] = ""
        yield {"tool_calls": [{"index": k, **call}]}
        for piece in _pieces(arguments):
            yield {"tool_calls": [{"index": k, "function": {"arguments": piece}}]}


def _pieces(text: str) -> Iterator[str]:
    return (text[i : i + CHUNK_CHARS] for i in range(0, len(text), CHUNK_CHARS))


def _calls(answered: Answered) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id or call_id(answered.node.id, k),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for k, call in enumerate(answered.message.tool_calls)
    ]


def finish_reason(answered: Answered) -> str:
    if answered.node.finish_reason != "stop":
        return "length"
    return "tool_calls" if answered.message.tool_calls else "stop"


def usage(answered: Answered) -> dict[str, Any]:
    said = answered.node.num_sampled
    return {
        "prompt_tokens": answered.num_prompt,
        "completion_tokens": said,
        "total_tokens": answered.num_prompt + said,
        "prompt_tokens_details": {"cached_tokens": answered.num_cached},
    }
