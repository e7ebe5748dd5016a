"""The rewards of judge models and reward models, with a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from cachetools import LRUCache

from sightline.envs.judge_model import JudgeModel
from sightline.message import user

QUESTION = (
    "Reference answer: {expected}\nAnswer to judge: {answer}\n"
    "Is the answer correct? End with `Score: ` and a number from {low:g} to {high:g}."
)


class Judge:
    """Asks a judge model for a score from `low` to `high`. Equal questions are asked once.

    `images` names the columns of images that the judge sees. A failure raises `JudgeFailed`: the
    rollout counts as broken, and the next one asks again.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str = "",
        question: str = QUESTION,
        images: Sequence[str] = (),
        low: float = 0.0,
        high: float = 1.0,
        cache_size: int = 10_000,
        **options: Any,
    ) -> None:
        self._model = JudgeModel(base_url, model, api_key, **options)
        self._question, self._images = question, tuple(images)
        self._low, self._high, self._scores = low, high, _Cache(cache_size)

    async def __call__(
        self, answer: str, expected: Any, row: Mapping[str, Any], chat: Any
    ) -> float:
        question = self._question
        values = {"answer": answer, "expected": expected, "low": self._low, "high": self._high}
        question = question.format_map({**row, **values})
        cells = [row.get(column) for column in self._images]
        refs = [r for cell in cells for r in (cell if isinstance(cell, list) else [cell]) if r]
        work = partial(self._model.score, [user(*refs, question)], chat.get, self._low, self._high)
        return await self._scores.get((question, *(ref.digest for ref in refs)), work)


class RewardModel:
    """Asks a reward model on `sightline serve` for the reward of the rollout's conversation.

    Equal conversations are rated once. Failures are as for `Judge`.
    """

    def __init__(
        self, base_url: str, model: str = "", api_key: str = "", cache_size: int = 10_000,
        **options: Any,
    ) -> None:  # fmt: skip
        self._model = JudgeModel(base_url, model, api_key, **options)
        self._rewards = _Cache(cache_size)

    async def __call__(self, answer: str, expected: Any, chat: Any) -> float:
        talk = chat.history
        work = partial(self._model.rate, talk, chat.get)
        return await self._rewards.get(msgspec.json.encode(talk), work)


class _Cache:
    """The newest scores, and those that are still being computed, which others wait for too."""

    def __init__(self, size: int) -> None:
        self._scores: LRUCache[tuple[Any, ...], asyncio.Future[float]] = LRUCache(size)

    async def get(self, key: Any, work: Callable[[], Coroutine[Any, Any, float]]) -> float:
        """Return the score `key`. The first caller computes it by `work`."""
        loop = asyncio.get_running_loop()
        score = self._scores.get((loop, key))
        if score is None:
            score = self._scores[loop, key] = loop.create_task(work())
            score.add_done_callback(partial(self._forget_failure, (loop, key)))
        return await asyncio.shield(score)

    def _forget_failure(self, key: tuple[Any, ...], done: asyncio.Future[float]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._scores.pop(key, None)
