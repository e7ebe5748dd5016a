"""One request on its way through vLLM."""

from __future__ import annotations

import asyncio
from bisect import bisect
from dataclasses import dataclass

from sightline.inference.engine import EngineRequest


@dataclass(slots=True, eq=False)
class VllmRequest(EngineRequest):
    task: asyncio.Task[None] | None = None
    is_running: bool = False
    """Whether vLLM has the request."""
    submitted_at: float = 0.0
    """When vLLM got the request; this and the next two by the monotonic clock of the machine."""
    scheduled_at: float = 0.0
    """When vLLM first computed something of the request."""
    first_token_at: float = 0.0

    def count_tokens_on_old_kv(self, updates: list[float]) -> int:
        """Tokens sampled over a KV cache of older weights, which `updates` have replaced at these
        moments. Cached tokens are of the weights under which vLLM got the request."""
        if not self.spans:
            return 0
        began_at = self.submitted_at if self.cached_tokens else self.scheduled_at
        is_old = bisect(updates, began_at) < bisect(updates, self.first_token_at)
        return len(self.tokens) - (0 if is_old else self.spans[0].end)
