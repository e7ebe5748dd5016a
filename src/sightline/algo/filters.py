"""Filters: which rollouts are left out of training, and the name under which they are counted.

A filter takes a trace and returns a verdict, or None where the rollout may train. The built-in
ones are switched on by the keys of `[filters]`; `[filters] custom` names others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from sightline.trace import Trace

Filter = Callable[[Trace], str | None]


def too_long(trace: Trace, *, max_sampled_tokens: int) -> str | None:
    """Drops a rollout that sampled more than `max_sampled_tokens` in all."""
    return "too_long" if trace.num_sampled > max_sampled_tokens else None


def repetitive(trace: Trace, *, max_repeats: int) -> str | None:
    """Drops a rollout in which one token stands `max_repeats` times in a row."""
    for node in trace.turns:
        sampled = node.token_ids.numpy()[node.sampled_start :]
        if any(len(list(run)) >= max_repeats for _, run in groupby(sampled.tolist())):
            return "repetitive"
    return None


def rare_token(trace: Trace, *, min_logprob: float) -> str | None:
    """Drops a rollout with a token that was sampled at a logprob below `min_logprob`."""
    rare = any(float(node.logprobs.numpy().min()) < min_logprob for node in trace.turns)
    return "rare_token" if rare else None
