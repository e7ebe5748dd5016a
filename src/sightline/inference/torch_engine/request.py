"""A request inside the embedded engine, and the engine's counters."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from sightline.inference.engine import EngineCounters, EngineRequest
from sightline.inference.torch_engine.prefix_cache import PromptKey
from sightline.pixels import Pixels
from sightline.wire.generate import VersionSpan


@dataclass(slots=True, eq=False)
class TorchRequest(EngineRequest):
    row: int = -1
    next_position: int = 0
    """Position of the first token after the prompt."""
    waiting_bytes: int = 0
    """The request's share of `waiting_bytes`; 0 once it runs."""
    span_start: int = 0
    """First output token of the current version."""
    awaited_prompt: PromptKey | None = None
    """The prompt that another row is computing, and that this request will share."""
    pending: dict[str, Future[Pixels]] = field(default_factory=dict)
    pixels: dict[str, Pixels] = field(default_factory=dict)
    """Pixels of images that are not encoded yet, by key."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Features of images whose slots are not computed yet, by key."""

    def close_span(self, version: str, num_sampled: int) -> None:
        """Record that `version` sampled the output tokens up to `num_sampled`."""
        if num_sampled > self.span_start:
            self.spans.append(VersionSpan(version, self.span_start, num_sampled))
            self.span_start = num_sampled


@dataclass
class TorchCounters(EngineCounters):
    computed_tokens: int = 0
    """Prompt tokens that were computed, including repeated prefills."""
    sampled_tokens: int = 0
    steps: int = 0
    decode_steps: int = 0
    """Consecutive pure decode steps, which the next three counters cover."""
    decode_tokens: int = 0
    decode_keys: int = 0
    """Tokens whose keys and values those steps read."""
    decode_seconds: float = 0.0
    busy_prefill_seconds: float = 0.0
    """Turns of the loop that contain prompts. This and the next three add up to `busy_seconds`."""
    busy_decode_seconds: float = 0.0
    busy_vision_seconds: float = 0.0
    """Passes of the vision tower, on the device's clock if it has one."""
    busy_adopt_seconds: float = 0.0
    rows_evicted: int = 0
