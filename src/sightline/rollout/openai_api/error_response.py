"""Errors as OpenAI's SDKs read them: a status, a message, the JSON path and a stable code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    def of(cls, error: SightlineError) -> OpenAIErrorResponse:
        message, param = f"{error.short_problem}\n  fix: {error.fix}", error.path or None
        if isinstance(error, EngineError):
            code = _ENGINE_CODES.get(error.kind, error.kind)
            return cls(error.status, code, message, param if error.status < 500 else None)
        for kind, status, code in _ERROR_CODES:
            if isinstance(error, kind):
                return cls(status, code, message, param)
        return cls(500, type(error).__name__, message)

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Tell SDKs not to retry, except after a 503."""
        return {"retry-after": "1"} if self.status == 503 else {"x-should-retry": "false"}


UNKNOWN_KEY = OpenAIErrorResponse(
    401, "invalid_api_key", "no running rollout has this key\n  fix: pass chat.api_key as api_key"
)
ROLLOUT_OVER = OpenAIErrorResponse(401, "rollout_over", "the rollout of this key is over")
NO_SUCH_ROUTE = OpenAIErrorResponse(
    404, "unknown_url", "only /v1/chat/completions and /v1/models are served here"
)
