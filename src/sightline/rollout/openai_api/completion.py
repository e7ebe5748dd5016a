"""Writes an answer as OpenAI's SDKs read it: one object, or the chunks of a stream.

A turn is sampled completely before its first chunk is sent, so a stream cannot fail halfway, and
its chunks separate text, tool calls and reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sightline.envs.openai_messages import to_openai_message
from sightline.message import AssistantMessage

CHUNK_CHARS = 48
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One of the answers to a request."""

    message: AssistantMessage
    call_ids: Sequence[str]
    """Ids of its tool calls, for models that do not write ids."""
    stopped: bool
    """Whether the model ended its turn; False if it was truncated."""
    num_tokens: int
    logprobs: list[dict[str, Any]] | None = None
    """One entry per token; None if not requested."""
    token_ids: list[int] | None = None
    """The sampled ids; None if not requested."""

    @property
    def finish_reason(self) -> str:
        if not self.stopped:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"

    @property
    def body(self) -> dict[str, Any]:
        return to_openai_message(self.message, lambda ref: ref.url, self.call_ids)


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The answer to one request."""

    name: str
    model: str
    created: int
    choices: list[ChatChoice]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the engine had in its KV cache."""
    prompt_token_ids: list[int] | None = None
    """Ids of the prompt; None if not requested."""

    def head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.name, "object": kind, "created": self.created, "model": self.model}
        if self.prompt_token_ids is not None:
            head["prompt_token_ids"] = self.prompt_token_ids
        return head

    @property
    def usage(self) -> dict[str, Any]:
        num_sampled = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": self.num_prompt_tokens + num_sampled,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def completion_body(answer: ChatCompletion) -> dict[str, Any]:
    return {
        **answer.head("chat.completion"),
        "choices": [
            {"index": i, "message": {**c.body, "refusal": None}, "logprobs": None, **_ending(c)}
            for i, c in enumerate(answer.choices)
        ],
        "usage": answer.usage,
    }


def _ending(choice: ChatChoice) -> dict[str, Any]:
    """Return why the choice ended, and the optional fields that were requested."""
    ending: dict[str, Any] = {"finish_reason": choice.finish_reason}
    if choice.logprobs is not None:
        ending["logprobs"] = {"content": choice.logprobs, "refusal": None}
    if choice.token_ids is not None:
        ending["token_ids"] = choice.token_ids
    return ending


def stream_events(answer: ChatCompletion, include_usage: bool) -> Iterator[bytes]:
    """Yield the events of a stream, including the final mark."""
    head = answer.head("chat.completion.chunk")

    def event(choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        body: dict[str, Any] = {**head, "choices": choices}
        if include_usage:
            body["usage"] = used
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    for i, choice in enumerate(answer.choices):
        for delta in _deltas(choice):
            yield event([{"index": i, "delta": delta, "finish_reason": None}])
        yield event([{"index": i, "delta": {}, **_ending(choice)}])
    if include_usage:
        yield event([], answer.usage)
    yield DONE


def _deltas(choice: ChatChoice) -> Iterator[dict[str, Any]]:
    message = choice.message
    yield {"role": "assistant", "content": None if message.tool_calls else ""}
    for piece in _split_text(message.reasoning or ""):
        yield {"reasoning_content": piece}
    for piece in _split_text(message.text):
        yield {"content": piece}
    for k, call in enumerate(choice.body.get("tool_calls", ())):
        arguments = call["function"].pop("arguments")
        call["function"]["arguments"] = ""
        yield {"tool_calls": [{"index": k, **call}]}
        for piece in _split_text(arguments):
            yield {"tool_calls": [{"index": k, "function": {"arguments": piece}}]}


def _split_text(text: str) -> Iterator[str]:
    return (text[i : i + CHUNK_CHARS] for i in range(0, len(text), CHUNK_CHARS))
