"""Messages as OpenAI's endpoints write them, and an answer of theirs as a message."""

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
    """A message as OpenAI's endpoints take it; `url_of` says how an image is shown there.

    `call_ids` name the calls to which the model itself gave no name.
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
        # Null beside calls is OpenAI's own way; elsewhere programs expect text.
        return message.text or (None if message.tool_calls else "")
    return [to_openai_part(part, url_of) for part in message.content]


def read_completion(answer: dict[str, Any]) -> AssistantMessage:
    """The first choice of a completion."""
    try:
        choice = answer["choices"][0]
        said = choice["message"]
        calls = tuple(
            ToolCall(
                call["function"]["name"], call["function"]["arguments"], str(call.get("id") or "")
            )
            for call in said.get("tool_calls") or ()
        )
        return AssistantMessage(
            role="assistant",
            content=text(said.get("content") or ""),
            reasoning=said.get("reasoning_content") or said.get("reasoning") or None,
            tool_calls=calls,
            stopped=choice.get("finish_reason") != "length",
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(
            f"the endpoint answered with no chat completion: {str(answer)[:200]}",
            "ask at the base url of an OpenAI-compatible server, such as .../v1",
            kind="foreign",
        ) from error
