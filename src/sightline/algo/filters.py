"""Filters: which rollouts are left out of training, and the name under which they are counted.

A filter takes a trace and returns a verdict, or None if the rollout may train. The keys of
`[filters]` switch on the built-in ones, and `[filters] custom` names others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from sightline.trace import Trace

Filter = Callable[[Trace], str | None]


def too_long(trace: Trace, *, max_sampled_tokens: int) -> str | None:
    """Drop a rollout that sampled more than `max_sampled_tokens` in total."""
    return "too_long" if trace.num_sampled > max_sampled_tokens else None


def repetitive(trace: Trace, *, max_repeats: int) -> str | None:
    """Drop a rollout that repeats one token `max_repeats` times in a row."""
    for node in trace.turns:
        sampled = node.token_ids.numpy()[node.sampled_start :]
        if any(len(list(run)) >= max_repeats for _, run in groupby(sampled.tolist())):
            return "repetitive"
    return None


def rare_token(trace: Trace, *, min_logprob: float) -> str | None:
    """Drop a rollout with a sampled token whose logprob is below `min_logprob`."""
    rare = any(float(node.logprobs.numpy().min()) < min_logprob for node in trace.turns)
    return "rare_token" if rare else None
