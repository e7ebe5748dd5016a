"""One request inside the engine."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sightline.errors import EngineError
from sightline.inference.engine import RequestTimeline
from sightline.pixels import Pixels
from sightline.wire import Slot
from sightline.wire.generate import SamplingParams, VersionSpan


@dataclass(slots=True, eq=False)
class TorchRequest:
    """The caller fills the first part and reads the last; the rest belongs to the engine."""

    prompt: np.ndarray
    """int32 (tokens,)."""
    slots: list[Slot]
    keys: list[str]
    """Of each slot's item: what its pixels are a function of."""
    params: SamplingParams
    seed: int
    owner: Any = None
    """Whatever the caller needs to find its client again."""

    row: int = -1
    next_position: int = 0
    """Of the first token after the prompt."""
    prompt_hash: int = 0
    waiting_bytes: int = 0
    """Its share of the bytes that wait; 0 once it has begun."""
    span_start: int = 0
    """First output token of the version that is sampling now."""
    pending: dict[str, Future[Pixels]] = field(default_factory=dict)
    pixels: dict[str, Pixels] = field(default_factory=dict)
    """Of images that are not encoded yet."""
    features: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of images whose slots are not computed yet."""
    digests: dict[str, str] = field(default_factory=dict)
    """Pixel digests by key."""

    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None
    """float32, of each token of the prompt, where they are asked for; NaN where there is none."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""
    """stop or length; abort for a request that was cancelled."""
    error: EngineError | None = None
    timeline: RequestTimeline = field(default_factory=RequestTimeline)

    @property
    def nbytes(self) -> int:
        """What it holds in memory while it waits: its ids, and its images once decoded."""
        shown = {slot.item.ref.digest: slot.item.ref for slot in self.slots}
        return self.prompt.nbytes + sum(3 * ref.width * ref.height for ref in shown.values())

    def pixel_digests(self) -> list[str]:
        return [self.digests[key] for key in self.keys]

    def close_span(self, version: str, num_sampled: int) -> None:
        """Output tokens up to `num_sampled` were sampled by `version`."""
        if num_sampled > self.span_start:
            self.spans.append(VersionSpan(version, self.span_start, num_sampled))
            self.span_start = num_sampled
