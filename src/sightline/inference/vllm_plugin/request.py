"""One request on its way through vLLM."""

from __future__ import annotations

import asyncio
from bisect import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sightline.errors import EngineError
from sightline.inference.engine import RequestTimeline
from sightline.wire import Slot
from sightline.wire.generate import SamplingParams, VersionSpan


@dataclass(slots=True, eq=False)
class VllmRequest:
    """The caller fills the first part and reads the last."""

    prompt: np.ndarray
    slots: list[Slot]
    keys: list[str]
    """Of each slot's item: what its pixels are a function of."""
    params: SamplingParams
    seed: int | None
    owner: Any = None

    task: asyncio.Task[None] | None = None
    is_running: bool = False
    """Whether vLLM has it."""
    submitted_at: float = 0.0
    """When vLLM got it; this and the next two by the monotonic clock of the machine."""
    scheduled_at: float = 0.0
    """When vLLM first computed something of it."""
    first_token_at: float = 0.0

    digests: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""
    error: EngineError | None = None
    timeline: RequestTimeline = field(default_factory=RequestTimeline)

    @property
    def nbytes(self) -> int:
        """What it holds in memory while it waits: its ids, and its images once decoded."""
        shown = {slot.item.ref.digest: slot.item.ref for slot in self.slots}
        return self.prompt.nbytes + sum(3 * ref.width * ref.height for ref in shown.values())

    def pixel_digests(self) -> list[str]:
        return self.digests

    def count_tokens_on_old_kv(self, updates: list[float]) -> int:
        """Tokens sampled over keys and values of older weights, which `updates` have replaced at
        these moments. Found ones are of the weights that it was handed over under."""
        if not self.spans:
            return 0
        began_at = self.submitted_at if self.cached_tokens else self.scheduled_at
        is_old = bisect(updates, began_at) < bisect(updates, self.first_token_at)
        return len(self.tokens) - (0 if is_old else self.spans[0].end)
