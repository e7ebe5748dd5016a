"""Plays held-out tasks against an endpoint, and says what they earned."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import random
import traceback
from dataclasses import dataclass, field
from functools import partial

from sightline.envs import Environment
from sightline.errors import SightlineError
from sightline.media import MediaStore
from sightline.rollout.openai_client import OpenAIChat, OpenAIClient
from sightline.rollout.player import to_outcome
from sightline.rollout.rollout_threads import RolloutThreads
from sightline.rollout.timeout import RolloutTimeout, run_with_timeout


@dataclass(frozen=True)
class EvalResult:
    """One rollout. Without a reward it broke, and `error` says over what."""

    task: int
    env: str
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    truncated: bool = False
    num_calls: int = 0
    num_tokens: int = 0


@dataclass
class EndpointEvaluator:
    env: Environment
    endpoint: OpenAIClient
    store: MediaStore
    shares_store: bool
    split: str = "eval"
    seed: int = 0
    at_once: int = 32
    timeout_s: float = 600.0
    threads: RolloutThreads = field(default_factory=RolloutThreads)

    async def evaluate_all(self, tasks: int) -> list[EvalResult]:
        gate = asyncio.Semaphore(self.at_once)

        async def one(task: int) -> EvalResult:
            async with gate:
                return await self.score(task)

        return list(await asyncio.gather(*map(one, range(tasks))))

    async def score(self, task: int) -> EvalResult:
        seed = _task_seed(self.seed, self.split, task)
        chat = OpenAIChat(self.endpoint, self.store, random.Random(seed), seed, self.shares_store)
        env = self.env.choose_environment(task, self.split)
        result, error = None, ""
        try:
            result = await run_with_timeout(
                self.timeout_s, self._play(env, task, chat), self.threads
            )
            outcome = to_outcome(result, env.name)
        except RolloutTimeout as problem:
            error = str(problem)
        except SightlineError as problem:
            error = str(problem)
        except Exception:  # user code: whatever it does costs this rollout only
            error = traceback.format_exc()
        return EvalResult(
            task,
            env.name,
            None if error else outcome.reward,
            {} if error else outcome.parts,
            error,
            bool(chat.truncations),
            chat.num_calls,
            chat.counted["tokens"],
        )

    async def _play(self, env: Environment, index: int, chat: OpenAIChat) -> object:
        task = env.task(index, self.split)
        try:
            if inspect.iscoroutinefunction(env.rollout):
                return await env.rollout(task, chat)
            return await self.threads.play(partial(env.rollout, task), chat, name=f"eval-{index}")
        except Exception:  # user code: a rollout that was cut short has a worth of its own
            if not chat.truncations:
                raise
            return env.truncated(task)


def _task_seed(seed: int, split: str, task: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{split}.{task}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
