"""One line of `metrics.jsonl`. Any process writes events, and `view` reads them."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    time: float
    """Seconds since 1970."""
    process: str
    """Name of the process that wrote it, such as orchestrator, trainer or worker-0."""
    kind: str
    """The event: step, train, probe, eval, goal, busy, dropped, lost, sink, health or state."""
    step: int = 0
    values: dict[str, Any] = {}
    """Numbers, or tables of numbers. Null if a value was not measured."""


STEP_METRICS = frozenset((
    "answer_tokens_max", "answer_tokens_mean", "bad", "bad_media", "broken", "broken_rate", "busy",
    "caches", "change", "compilations", "compute_s", "differing_routes_fraction", "distinct_images",
    "door_errors", "elapsed_s", "envs", "error", "eta_s", "exchanged_kl", "forks", "fresh_tokens",
    "gpu_peak_gb", "grad_norm", "groups", "groups_ahead", "groups_replaced", "groups_replayed",
    "images", "images_shown", "images_stored", "in_flight", "is_blind", "is_weak", "kind", "lag_kl",
    "lag_max", "lag_mean", "loss", "lr", "micro_batches", "mismatch_kl", "no_signal_rate", "noise",
    "oom_splits", "parts", "pixels", "publish_s", "reward", "reward_group_std", "reward_std",
    "rollout_wait_s", "same_kl", "samples", "seconds", "seconds_total", "self", "sft_eval", "step",
    "steps_total", "store_bytes", "tasks_set_aside", "tokens", "tokens_per_s", "tokens_sampled",
    "tokens_sampled_total", "tokens_trained_total", "trained_tokens", "truncated", "truncated_rate",
    "turns_mean", "verdicts", "version", "vision_lr", "waited_s", "waiting", "words",
    "workers_lost",
))  # fmt: skip
"""Names in the events of a step. They share the dashboard's charts with the algorithm's metrics,
which therefore cannot have these names."""
