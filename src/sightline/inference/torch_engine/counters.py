"""What the engine has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TorchCounters:
    """Since the start; written by the engine's thread alone."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were computed, those of a second prefill included."""
    sampled_tokens: int = 0
    tokens_on_old_kv: int = 0
    """Sampled on keys and values of an older version; see keep_kv_over_updates."""
    steps: int = 0
    adopted: int = 0
    prefilled_again: int = 0
    """Requests whose keys and values a weight update threw away."""
    rows_evicted: int = 0
