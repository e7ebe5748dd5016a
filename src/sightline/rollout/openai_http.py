"""HTTP responses of the OpenAI endpoints of rollouts and of inference servers.

An error has a status, a message, the JSON path and a stable code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response, StreamingResponse

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
from sightline.rollout.openai_completions import ChatDialect, ChatRequest
from sightline.rollout.openai_responses import ResponsesDialect
from sightline.transport.http_server import json_response

DIALECTS: dict[str, type[ChatDialect]] = {
    "/v1/chat/completions": ChatDialect,
    "/v1/responses": ResponsesDialect,
}
"""The request format of each path that answers with the model."""


def models_response(model: str, **more: Any) -> Response:
    """Return the list of an endpoint's only model."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "sightline", **more}
    return json_response({"object": "list", "data": [entry]})


def completion_response(
    request: ChatRequest, completion: dict[str, Any], dialect: ChatDialect
) -> Response:
    """Return the completed answer to a request, as one object or as a stream."""
    if not request.stream:
        return json_response(dialect.to_answer(completion))

    async def stream() -> AsyncIterator[bytes]:
        for chunk in dialect.to_events(completion, request.include_usage):
            yield chunk

    headers = {"cache-control": "no-cache"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


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
    def of(cls, error: SightlineError, dialect: ChatDialect) -> OpenAIErrorResponse:
        """Describe an error, with the names that the request's format uses."""
        path, problem = error.path, error.short_problem
        own_path = dialect.rename(path)
        message = f"{own_path}{problem.removeprefix(path)}\n  fix: {error.fix}"
        param = own_path or None
        if isinstance(error, EngineError):
            code = _ENGINE_CODES.get(error.kind, error.kind)
            return cls(error.status, code, message, param if error.status < 500 else None)
        for kind, status, code in _ERROR_CODES:
            if isinstance(error, kind):
                return cls(status, code, message, param)
        return cls(500, type(error).__name__, message)

    def to_response(self) -> Response:
        """Return the HTTP response. It tells SDKs not to retry, except after a 503."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        headers = {"retry-after": "1"} if self.status == 503 else {"x-should-retry": "false"}
        return json_response({"error": error}, self.status, headers)


UNKNOWN_KEY = OpenAIErrorResponse(
    401, "invalid_api_key", "no running rollout has this key\n  fix: pass chat.api_key as api_key"
)
ROLLOUT_OVER = OpenAIErrorResponse(401, "rollout_over", "the rollout of this key is over")
NO_SUCH_ROUTE = OpenAIErrorResponse(
    404, "unknown_url", "only /v1/chat/completions, /v1/responses and /v1/models are served here"
)
