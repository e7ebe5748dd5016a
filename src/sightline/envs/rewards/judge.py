"""The reward of a judge model, with a cache."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

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
        self._low, self._high, self._cache_size = low, high, cache_size
        self._scores: OrderedDict[tuple[Any, ...], asyncio.Future[float]] = OrderedDict()
        """Scores by question and images, including those that the judge is still asked for."""

    async def __call__(
        self, answer: str, expected: Any, row: Mapping[str, Any], chat: Any
    ) -> float:
        question = self._question
        values = {"answer": answer, "expected": expected, "low": self._low, "high": self._high}
        question = question.format_map({**row, **values})
        cells = [row.get(column) for column in self._images]
        refs = [r for cell in cells for r in (cell if isinstance(cell, list) else [cell]) if r]
        loop = asyncio.get_running_loop()
        key = (loop, question, *(ref.digest for ref in refs))
        score = self._scores.get(key)
        if score is None:
            work = self._model.score([user(*refs, question)], chat.get, self._low, self._high)
            score = self._scores[key] = loop.create_task(work)
            score.add_done_callback(lambda done: self._forget_failure(key, done))
            if len(self._scores) > self._cache_size:
                self._scores.popitem(last=False)
        return await asyncio.shield(score)  # others wait for it too

    def _forget_failure(self, key: tuple[Any, ...], done: asyncio.Future[float]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._scores.pop(key, None)
