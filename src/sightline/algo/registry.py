"""Load the functions of a run's algorithm, and check them before anything starts.

A setting names a built-in function, or one of your own as "module:function". Its keyword arguments
are checked against its signature. A function from outside the package is also tested on a small
batch: a wrong shape is then an error that names the setting, and not a failed step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from sightline.algo.credit import (
    ADVANTAGES,
    AGGREGATIONS,
    CREDITS,
    AdvantageFunction,
    AggregationFunction,
    CreditFunction,
    GroupRewards,
    grpo,
)
from sightline.config import FiltersConfig
from sightline.config.load import load_object
from sightline.config.secret_refs import resolve_references
from sightline.errors import ConfigError
from sightline.message import assistant, user
from sightline.trace import Node, PolicySpan, Trace
from sightline.trace.node import float32_array, int32_array

_ABOVE_ZERO = ("beta", "divisor", "num", "ratio", "temperature")
Filter = Callable[[Trace], str | None]
"""Takes a trace and returns a verdict, or None if the rollout may train."""


def load_named(
    setting: str, name: str, built_in: Mapping[str, Any], kind: str, args: Mapping[str, Any]
) -> Any:
    """Return the function or class that `setting` names, a built-in one or "module:name"."""
    if name in built_in:  # a negative argument would reverse the update, and some divide
        parameters = inspect.signature(built_in[name]).parameters
        for key, value in args.items():
            default = getattr(parameters.get(key), "default", None)
            has_other_type = type(default) in (int, float) and type(value) not in (int, float)
            low = 1e-300 if key.split("_")[0] in _ABOVE_ZERO else 0
            if has_other_type or isinstance(value, int | float) and not low <= value < float("inf"):
                problem = f"{setting} = {name!r}: {key} = {value!r} is out of range"
                raise ConfigError(problem, "set a positive number")
        return built_in[name]
    if ":" not in name:
        raise ConfigError(
            f"{setting} = {name!r} is not built in",
            f"use one of {', '.join(map(repr, built_in))}, or 'module:{kind}' of your own",
        )
    return load_object(name, setting)


def load_function(
    setting: str,
    name: str,
    built_in: Mapping[str, Callable[..., Any]],
    args: Mapping[str, Any],
    parameters: tuple[str, ...],
) -> Callable[..., Any]:
    """Return the function that `setting` names, with `args` bound to its keyword arguments.

    `parameters` names its positional arguments.
    """
    function = load_named(setting, name, built_in, "function", args)
    if not callable(function):
        raise ConfigError(f"{setting} = {name!r} is not a function", "set it to a function")
    signature = inspect.signature(function)
    try:
        signature.bind(*parameters, **args)
    except TypeError as error:
        raise ConfigError(
            f"{setting} = {name!r} cannot be called with ({', '.join(parameters)}"
            f"{''.join(f', {key}=...' for key in args)}): {error}",
            f"its signature is {name.rpartition(':')[2]}{signature}. See docs/custom_algorithms.md",
        ) from error
    return (
        partial(function, **resolve_references(dict(args), f"{setting}_args")) if args else function
    )


def try_function(setting: str, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call `function` on a small batch. If it fails, the error names the setting."""
    try:
        return function(*inputs)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{setting} = {name!r} failed on a small batch: {type(error).__name__}: {error}",
            "call it on a small batch yourself, as docs/custom_algorithms.md shows",
        ) from error


def check_array(setting: str, name: str, result: Any, length: int, what: str) -> None:
    """Raise unless a function returned a finite float array with one number for each `what`."""
    is_array = isinstance(result, np.ndarray) and result.dtype.kind == "f"
    if not is_array or result.shape != (length,) or not np.isfinite(result).all():
        text = f"{result.dtype} {result.shape}" if isinstance(result, np.ndarray) else repr(result)
        raise ConfigError(
            f"{setting} = {name!r} returned {text} for {length} {what}",
            f"return a numpy array of finite floats with shape ({length},)",
        )


def load_advantage(name: str, args: Mapping[str, Any] | None = None) -> AdvantageFunction:
    setting = "[algorithm] advantage"
    function = load_function(setting, name, ADVANTAGES, args or {}, ("rewards",))
    if name not in ADVANTAGES:
        for rewards in (np.array([0.0, 1.0, 0.5, 0.5]), np.zeros(4)):
            advantages = try_function(setting, name, function, rewards)
            check_array(setting, name, advantages, len(rewards), "rewards")
    return function


def load_credit(name: str) -> CreditFunction:
    setting = "[algorithm] credit"
    function = load_function(setting, name, CREDITS, {}, ("group", "advantage"))
    if name not in CREDITS:
        rows = (np.array([0.0, 1.0]), np.array([0.5]))
        group = GroupRewards(np.array([1.0, 0.5]), (2, 1), rows, "trial")
        advantages = try_function(setting, name, function, group, grpo)
        if not isinstance(advantages, list) or len(advantages) != 2:
            raise ConfigError(
                f"{setting} = {name!r} returned {advantages!r} for 2 rollouts",
                "return a list with one array per rollout",
            )
        for row, num in zip(advantages, group.num_turns, strict=True):
            check_array(setting, name, row, num, "turns")
    return function


def load_aggregation(name: str, args: Mapping[str, Any] | None = None) -> AggregationFunction:
    setting = "[algorithm] aggregation"
    function = load_function(setting, name, AGGREGATIONS, args or {}, ("num_trained",))
    if name not in AGGREGATIONS:
        counts = np.array([3, 1, 0])
        check_array(setting, name, try_function(setting, name, function, counts), 3, "samples")
    return function


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


def load_filters(config: FiltersConfig) -> list[Filter]:
    """Return the filters that `[filters]` switches on, the built-in ones first."""
    filters: list[Filter] = []
    if config.max_sampled_tokens:
        filters.append(partial(too_long, max_sampled_tokens=config.max_sampled_tokens))
    if config.max_repeats:
        filters.append(partial(repetitive, max_repeats=config.max_repeats))
    if config.min_logprob is not None:
        filters.append(partial(rare_token, min_logprob=config.min_logprob))
    setting = "[filters] custom"
    for name in config.custom:
        function = load_function(setting, name, {}, {}, ("trace",))
        verdict = try_function(setting, name, function, _build_small_trace())
        if verdict is not None and not (isinstance(verdict, str) and verdict.isidentifier()):
            raise ConfigError(
                f"{setting}: {name!r} returned {verdict!r}",
                'return None if the rollout may train, or its verdict, such as "too_polite"',
            )
        filters.append(function)
    return filters


def _build_small_trace() -> Trace:
    """Return a rollout of one turn, for trying a filter."""
    question = Node(0, -1, user("2 + 2?"), int32_array([1, 2]), sampled_start=2)
    answer = Node(
        1,
        0,
        assistant("4"),
        int32_array([3, 4, 5]),
        sampled_start=1,
        logprobs=float32_array([-0.5, -0.1]),
        versions=(PolicySpan(0, 2, version=0, epoch=0),),
        finish_reason="stop",
    )
    return Trace(id="trial", env="trial", nodes=[question, answer], reward=1.0)
