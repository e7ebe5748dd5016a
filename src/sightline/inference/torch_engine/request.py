"""One request inside the embedded engine, and what the engine counts."""

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
    """The request's share of the bytes that wait; 0 once it has begun."""
    span_start: int = 0
    """First output token of the version that is sampling now."""
    awaited_prompt: PromptKey | None = None
    """The prompt that another row computes, and this one will share."""
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
    decode_steps: int = 0
    """Steps of one token a row, one after the other, which the next three are of."""
    decode_tokens: int = 0
    decode_keys: int = 0
    """Tokens whose keys and values were read."""
    decode_seconds: float = 0.0
    busy_prefill_seconds: float = 0.0
    """Turns of the loop with prompts in them, rows that decode beside them included; the parts of
    `busy_seconds` are this one and the next three."""
    busy_decode_seconds: float = 0.0
    busy_vision_seconds: float = 0.0
    """Passes of the vision tower, by the device's clock where it has one."""
    busy_adopt_seconds: float = 0.0
    rows_evicted: int = 0
