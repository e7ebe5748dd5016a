"""A client for OpenAI-compatible chat endpoints."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec

from sightline.errors import EngineError, MessageError
from sightline.message import AssistantMessage, text
from sightline.message.parts import read_tool_call
from sightline.render.protocol import Tools
from sightline.transport.http_client import RetryingClient

RETRY_STATUSES = (408, 425, 429, 502, 503, 504)
FIRST_ANSWER_TIMEOUT_S = 10.0
"""Time limit for the first answer, after which the address counts as wrong."""


def read_completion(answer: dict[str, Any]) -> AssistantMessage:
    """Return the first choice of a completion."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        return AssistantMessage(
            role="assistant",
            content=text(message.get("content") or ""),
            reasoning=message.get("reasoning_content") or message.get("reasoning") or None,
            tool_calls=tuple(read_tool_call(call, "tool_calls") for call in calls),
            stopped=choice.get("finish_reason") != "length",
        )
    except (KeyError, IndexError, TypeError, AttributeError, MessageError) as error:
        raise EngineError(
            f"the endpoint's answer is not a chat completion: {str(answer)[:200]}",
            "use the base URL of an OpenAI-compatible server, such as .../v1",
            kind="foreign",
        ) from error


@dataclass
class OpenAIClient(RetryingClient):
    """Client for one endpoint. `base_url` does not include `/chat/completions`."""

    model: str
    """Name of the model. Empty until `choose_model` sets it."""
    _: KW_ONLY
    deadline_s: float = 120.0
    first_retry_s: float = 0.25
    longest_retry_s: float = 10.0
    retry_statuses: tuple[int, ...] = RETRY_STATUSES
    unreachable_fix: str = "check the address: it ends in /v1 on most servers"

    async def complete(
        self, messages: list[dict[str, Any]], tools: Tools | None, **sampling: Any
    ) -> dict[str, Any]:
        """Request a chat completion. `sampling` has request fields such as temperature."""
        fields = {"messages": messages, **sampling, **({"tools": list(tools)} if tools else {})}
        return await self.post("/chat/completions", fields)

    async def post(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer to a request about the model."""
        body = msgspec.json.encode({"model": self.model, **fields})
        return await self._request_json("POST", path, body)

    async def choose_model(self, timeout_s: float = FIRST_ANSWER_TIMEOUT_S) -> None:
        """Wait until the endpoint answers. If no model is set, choose its only model."""
        await self.wait_reachable("/models", timeout_s)
        if self.model:
            return
        listed = (await self._request_json("GET", "/models")).get("data") or []
        names = [str(model["id"]) for model in listed]
        if len(names) != 1:
            raise EngineError(
                f"{self.base_url} lists {len(names)} models: {', '.join(names[:8])}",
                "set the model to evaluate",
                kind="foreign",
            )
        self.model = names[0]

    async def _request_json(
        self, method: str, path: str, body: bytes | None = None
    ) -> dict[str, Any]:
        data = await self.request(method, path, body)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{self.base_url}{path} does not answer as an OpenAI endpoint: {error}",
                self.unreachable_fix,
                kind="foreign",
            ) from error

    def read_error(self, status: int, data: bytes) -> EngineError:
        text, code = data[:300].decode(errors="replace"), "foreign"
        try:
            error = msgspec.json.decode(data)["error"]
            text, code = str(error.get("message") or text), str(error.get("code") or code)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
            pass
        fix = self.unreachable_fix if status == 404 else "see the endpoint's docs"
        return EngineError(f"{self.base_url} answered {status}: {text}", fix, code, status)
