"""Convert messages to OpenAI's format, and OpenAI completions to messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sightline.errors import EngineError
from sightline.media import MediaRef
from sightline.message import AssistantMessage, Message, ToolCall, text, to_openai_part

GetImageUrl = Callable[[MediaRef], str]


def to_openai_message(
    message: Message, url_of: GetImageUrl, call_ids: Sequence[str] = ()
) -> dict[str, Any]:
    """Convert a message to OpenAI's format; `url_of` returns the URL of an image.

    `call_ids` are the ids of tool calls to which the model gave none.
    """
    sent: dict[str, Any] = {"role": message.role, "content": _to_openai_content(message, url_of)}
    if message.reasoning is not None:
        sent["reasoning_content"] = message.reasoning
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id or (call_ids[k] if call_ids else f"call_{k}"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for k, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        sent["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        sent["name"] = message.name
    return sent


def _to_openai_content(message: Message, url_of: GetImageUrl) -> Any:
    if not message.refs:
        # OpenAI writes null next to tool calls; elsewhere programs expect text.
        return message.text or (None if message.tool_calls else "")
    return [to_openai_part(part, url_of) for part in message.content]


def read_completion(answer: dict[str, Any]) -> AssistantMessage:
    """Return the first choice of a completion."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        calls = tuple(
            ToolCall(
                call["function"]["name"], call["function"]["arguments"], str(call.get("id") or "")
            )
            for call in message.get("tool_calls") or ()
        )
        return AssistantMessage(
            role="assistant",
            content=text(message.get("content") or ""),
            reasoning=message.get("reasoning_content") or message.get("reasoning") or None,
            tool_calls=calls,
            stopped=choice.get("finish_reason") != "length",
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(
            f"the endpoint's answer is not a chat completion: {str(answer)[:200]}",
            "use the base URL of an OpenAI-compatible server, such as .../v1",
            kind="foreign",
        ) from error
