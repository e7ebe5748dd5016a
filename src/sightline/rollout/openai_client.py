"""Asks a model behind any OpenAI endpoint, for evaluation: nothing here trains."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec

from sightline.errors import EngineError
from sightline.render import Tools
from sightline.transport.http_client import RetryingClient

RETRY_STATUSES = (408, 425, 429, 502, 503, 504)
FIRST_ANSWER_TIMEOUT_S = 10.0
"""An address at which nothing answers for so long at the start is taken for a wrong one."""


@dataclass
class OpenAIClient(RetryingClient):
    """`base_url` ends where `/chat/completions` begins. One for each endpoint."""

    model: str
    """Name of the model there; empty until `choose_model` has found it."""
    api_key: str = "none"
    _: KW_ONLY
    deadline_s: float = 120.0
    first_retry_s: float = 0.25
    longest_retry_s: float = 10.0
    retry_statuses: tuple[int, ...] = RETRY_STATUSES
    unreachable_fix: str = "check the address: it ends in /v1 on most servers"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.headers = {"authorization": f"Bearer {self.api_key}", **self.headers}

    async def complete(
        self, messages: list[dict[str, Any]], tools: Tools | None, **sampling: Any
    ) -> dict[str, Any]:
        """A chat completion; `sampling` are fields of the request, such as temperature."""
        body = {"model": self.model, "messages": messages, **sampling}
        if tools:
            body["tools"] = list(tools)
        return await self._request_json("POST", "/chat/completions", msgspec.json.encode(body))

    async def choose_model(self, timeout_s: float = FIRST_ANSWER_TIMEOUT_S) -> None:
        """Waits until something answers, and takes the one model that it lists as `model`."""
        await self.wait_reachable("/models", timeout_s)
        if self.model:
            return
        listed = (await self._request_json("GET", "/models")).get("data") or []
        names = [str(model["id"]) for model in listed]
        if len(names) != 1:
            raise EngineError(
                f"{self.base_url} lists {len(names)} models: {', '.join(names[:8])}",
                "name the one to evaluate",
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
            said = msgspec.json.decode(data)["error"]
            text, code = str(said.get("message") or text), str(said.get("code") or code)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
            pass
        return EngineError(
            f"the endpoint answered {status}: {text}", "see the endpoint's docs", code, status
        )
