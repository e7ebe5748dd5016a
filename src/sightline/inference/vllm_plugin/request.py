"""One request on its way through vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sightline.errors import EngineError
from sightline.inference.engine import Passed
from sightline.wire import Slot
from sightline.wire.generate import SamplingParams, VersionSpan


@dataclass(slots=True, eq=False)
class Request:
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
    updates: int = 0
    """Weight updates since vLLM has it."""

    digests: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""
    error: EngineError | None = None
    passed: Passed = field(default_factory=Passed)

    @property
    def nbytes(self) -> int:
        """What it holds in memory while it waits: its ids, and its images once decoded."""
        shown = {slot.item.ref.digest: slot.item.ref for slot in self.slots}
        return self.prompt.nbytes + sum(3 * ref.width * ref.height for ref in shown.values())

    def pixel_digests(self) -> list[str]:
        return self.digests
