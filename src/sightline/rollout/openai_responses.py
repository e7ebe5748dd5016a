"""OpenAI's Responses API, translated to and from chat completions.

    request --ResponsesDialect.to_chat--> chat completion --to_answer, to_events--> response

The items of one answer (reasoning, text and calls) form one assistant message, so that a history
that is sent back matches the turn that sampled it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from sightline.errors import MessageError
from sightline.rollout.openai_completions import ChatDialect, FindPast

_SAME_FIELDS = frozenset({
    "metadata", "min_p", "model", "moderation", "parallel_tool_calls", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "seed", "service_tier",
    "store", "stream", "temperature", "tool_choice", "top_k", "top_logprobs", "top_p", "user",
})  # fmt: skip
_READ_FIELDS = frozenset({
    "input", "instructions", "max_output_tokens", "previous_response_id", "text", "tools",
})  # fmt: skip
_IGNORED = frozenset({"max_tool_calls", "reasoning", "stream_options"})
# Unsupported fields, each with a test for neutral values.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "access_programs": lambda value: False,
    "background": lambda value: value is False,
    "context_management": lambda value: value == [],
    "conversation": lambda value: False,
    "image": lambda value: False,
    "include": lambda value: value in ([], ["reasoning.encrypted_content"]),
    "prompt": lambda value: False,
    "truncation": lambda value: value == "disabled",
}
_OWN_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
_ECHOED = (
    "instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning",
    "temperature", "text", "top_p", "user",
)  # fmt: skip
_MESSAGE_PATH = re.compile(r"messages\[(\d+)\]")


class ResponsesDialect(ChatDialect):
    """One request to `/v1/responses`."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self._sources: list[str] = []
        """The path in the request that each message comes from."""
        self._is_translated = False

    def to_chat(self, fields: dict[str, Any], find_past: FindPast) -> dict[str, Any]:
        """Return the fields as those of a chat completion."""
        self.fields, self.has_instructions = fields, "instructions" in fields
        for name, value in fields.items():
            if name in _UNSUPPORTED and not _UNSUPPORTED[name](value):
                raise MessageError.at(name, "this value is not supported", "leave it out")
            if name not in _SAME_FIELDS | _READ_FIELDS | _IGNORED | _UNSUPPORTED.keys():
                raise MessageError.at(name, "this field is unknown", "leave it out")
        chat = {name: value for name, value in fields.items() if name in _SAME_FIELDS}
        messages: list[Any] = []
        if self.has_instructions:
            messages.append({"role": "system", "content": fields["instructions"]})
            self._sources.append("instructions")
        if "previous_response_id" in fields:
            past = find_past(str(fields["previous_response_id"]))
            messages += past
            self._sources += ["previous_response_id"] * len(past)
        messages += self._read_input(fields.get("input"))
        chat["messages"] = messages
        if "max_output_tokens" in fields:
            chat["max_completion_tokens"] = fields["max_output_tokens"]
        if "tools" in fields:
            chat["tools"] = _read_tools(fields["tools"])
        text = fields.get("text", {})
        if not isinstance(text, dict):
            raise MessageError.at("text", f"its type is {type(text).__name__}", "pass an object")
        self._is_translated = True
        return chat | {"response_format": text.get("format")}

    def rename(self, path: str) -> str:
        if not self._is_translated:  # the error is about the request itself
            return path
        if match := _MESSAGE_PATH.match(path):
            return self._sources[int(match[1])] + path[match.end() :]
        return _OWN_NAMES.get(path, path.replace(".function", ""))

    def _read_input(self, items: Any) -> list[dict[str, Any]]:
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list):
            raise MessageError.at("input", f"its type is {type(items).__name__}", "pass items")
        messages: list[dict[str, Any]] = []
        answer: dict[str, Any] | None = None
        for i, item in enumerate(items):
            message = _read_item(item, f"input[{i}]")
            if answer is not None and _continues(answer, message):
                calls = answer.get("tool_calls", [])
                calls += message.get("tool_calls", ())
                answer |= message | ({"tool_calls": calls} if calls else {})
                continue
            messages.append(message)
            self._sources.append(f"input[{i}]")
            answer = message if message["role"] == "assistant" else None
        return messages

    def to_answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the response object."""
        (choice,), usage = completion["choices"], completion["usage"]
        name = completion["id"].removeprefix("chatcmpl-")
        is_whole = choice["finish_reason"] != "length"
        status = "completed" if is_whole else "incomplete"
        return {
            **{name: self.fields.get(name) for name in _ECHOED},
            "id": f"resp_{name}",
            "object": "response",
            "created_at": completion["created"],
            "completed_at": completion["created"] if is_whole else None,
            "model": completion["model"],
            "status": status,
            "error": None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "background": False,
            "output": list(_build_items(choice["message"], name, status)),
            "parallel_tool_calls": self.fields.get("parallel_tool_calls", True),
            "tool_choice": self.fields.get("tool_choice", "auto"),
            "tools": self.fields.get("tools", []),
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def to_events(self, completion: dict[str, Any], include_usage: bool) -> Iterator[bytes]:
        """Yield the events of a stream."""
        for number, (kind, values) in enumerate(_list_events(self.to_answer(completion))):
            body = {"type": kind, "sequence_number": number, **values}
            yield b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


def _read_item(item: Any, path: str) -> dict[str, Any]:
    """Return the chat message that an item is, or is a part of."""
    if not isinstance(item, dict):
        raise MessageError.at(path, f"its type is {type(item).__name__}", "pass an object")
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        content, call_id = item.get("output"), item.get("call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    if kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise MessageError.at(f"{path}.content", "it is no list", "send it as received")
        texts = [str(part.get("text", "")) for part in parts]
        return {"role": "assistant", "reasoning_content": "".join(texts) if texts else None}
    raise MessageError.at(
        f"{path}.type",
        f"{kind!r} is not supported",
        "send messages, reasoning, function_call and function_call_output items",
    )


def _continues(answer: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether an item belongs to the same answer as the items before it."""
    is_call = "tool_calls" in message
    starts_text = "content" in message and not {"content", "tool_calls"} & answer.keys()
    return message["role"] == "assistant" and (is_call or starts_text)


def _read_tools(tools: Any) -> Any:
    """Return the tools of a chat completion. Values of a wrong type are left for its checks."""
    if not isinstance(tools, list):
        return tools
    read = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise MessageError.at(f"tools[{i}].type", f"{kind!r} is not supported", "use function")
        function = {name: value for name, value in tool.items() if name != "type"}
        read.append({"type": "function", "function": function})
    return read


def _build_items(message: dict[str, Any], name: str, status: str) -> Iterator[dict[str, Any]]:
    """Yield the output items of an answer."""
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        reasoning = {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content}
        yield {**reasoning, "status": status}
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        spelled = message["content"] or ""
        text = {"type": "output_text", "text": spelled, "annotations": list[Any]()}
        item = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [text]}
        yield {**item, "status": status}
    for k, call in enumerate(calls):
        item = {"type": "function_call", "id": f"fc_{name}_{k}", "call_id": call["id"]}
        yield {**item, **call["function"], "status": status}


def _list_events(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events whose replay builds the response, with one delta for each text."""
    started = {**response, "status": "in_progress", "output": [], "usage": None}
    started |= {"completed_at": None, "incomplete_details": None}
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for number, item in enumerate(response["output"]):
        at = {"output_index": number}
        blank: dict[str, Any] = {"arguments": ""} if "name" in item else {"content": []}
        started_item = {**item, "status": "in_progress", **blank}
        yield "response.output_item.added", {**at, "item": started_item}
        where = {**at, "item_id": item["id"]}
        if "name" in item:
            kind = "response.function_call_arguments"
            yield f"{kind}.delta", {**where, "delta": item["arguments"]}
            yield f"{kind}.done", {**where, "name": item["name"], "arguments": item["arguments"]}
        for index, part in enumerate(item.get("content", ())):
            where = {**where, "content_index": index}
            kind = f"response.{part['type']}"
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
            yield f"{kind}.delta", {**where, "delta": part["text"], **more}
            yield f"{kind}.done", {**where, "text": part["text"], **more}
            yield "response.content_part.done", {**where, "part": part}
        yield "response.output_item.done", {**at, "item": item}
    yield f"response.{response['status']}", {"response": response}
