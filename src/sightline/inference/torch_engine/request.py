"""One request inside the embedded engine, and what the engine counts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from sightline.inference.engine import EngineCounters, EngineRequest
from sightline.pixels import Pixels
from sightline.wire.generate import VersionSpan


@dataclass(slots=True, eq=False)
class TorchRequest(EngineRequest):
    row: int = -1
    next_position: int = 0
    """Position of the first token after the prompt."""
    waiting_bytes: int = 0
    """The request's share of the bytes that wait; 0 once it has begun."""
    span_start: int = 0
    """First output token of the version that is sampling now."""
    pending: dict[str, Future[Pixels]] = field(default_factory=dict)
    pixels: dict[str, Pixels] = field(default_factory=dict)
    """Pixels of images that are not encoded yet, by key."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Features of images whose slots are not computed yet, by key."""

    def close_span(self, version: str, num_sampled: int) -> None:
        """Output tokens up to `num_sampled` were sampled by `version`."""
        if num_sampled > self.span_start:
            self.spans.append(VersionSpan(version, self.span_start, num_sampled))
            self.span_start = num_sampled


@dataclass
class TorchCounters(EngineCounters):
    computed_tokens: int = 0
    """Prompt tokens that were computed, those of a second prefill included."""
    sampled_tokens: int = 0
    steps: int = 0
    rows_evicted: int = 0
