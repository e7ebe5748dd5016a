"""Rewards by name: functions that compare an answer with a row's reference.

A reward function is called as `function(answer, expected, **args)` and returns a number, usually
from 0 to 1. If it has parameters `row` or `chat`, it also receives the row and the rollout's chat.
It may be async. A class is built from the arguments, and its instance is called.
An invalid answer earns 0. An invalid reference raises ValueError, because the data is wrong.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from sightline.config.load import load_object
from sightline.envs.protocol import check_arguments
from sightline.errors import ConfigError

REWARDS = {
    "exact": "text:exact",
    "fuzzy": "text:fuzzy",
    "ocr": "text:ocr",
    "set": "text:set_overlap",
    "choice": "choices:choice",
    "number": "quantities:number",
    "math": "latex:LatexMath",
    "iou": "boxes:iou",
    "points": "boxes:points",
    "table": "structures:table",
    "code": "structures:code",
    "json": "structures:json_overlap",
    "json_schema": "structures:json_schema",
    "judge": "judge:Judge",
    "reward_model": "judge:RewardModel",
}
"""Built-in rewards, by the names that run files use."""
_CONTEXT = ("row", "chat")
"""Parameters that receive the row and the chat."""


Reward = Callable[[str, Any, Mapping[str, Any], Any], Awaitable[float]]
"""Returns the reward of an answer, given the expected answer, the row and the chat."""


def build_reward(name: str, args: Mapping[str, Any], setting: str = "reward") -> Reward:
    """Build the reward `name`: a built-in one, or `module:function` or `module:Class`."""
    if ":" not in name and name not in REWARDS:
        raise ConfigError(
            f"{setting} = {name!r} is not a built-in reward",
            f"use 'module:function', or one of {', '.join(REWARDS)}",
        )
    path = name if ":" in name else f"{__name__}.{REWARDS[name]}"
    function, problem = load_object(path, setting), f"{setting}_args does not fit {name!r}"
    if inspect.isclass(function):
        check_arguments(function, (), args, problem)
        function, args = function(**args), {}
    parameters = inspect.signature(function).parameters
    context = tuple(name for name in _CONTEXT if name in parameters and name not in args)
    check_arguments(function, ("", ""), {**args, **dict.fromkeys(context)}, problem)
    bound = partial(function, **args)

    async def reward(answer: str, expected: Any, row: Mapping[str, Any], chat: Any) -> float:
        given = {name: {"row": row, "chat": chat}[name] for name in context}
        result = await asyncio.to_thread(bound, answer, expected, **given)
        return float(await result if inspect.isawaitable(result) else result)

    return reward
