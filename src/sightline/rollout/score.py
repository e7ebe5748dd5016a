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
from sightline.rollout.blocking import Threads
from sightline.rollout.endpoint import Endpoint, EndpointChat
from sightline.rollout.limit import OutOfTime, within
from sightline.rollout.play import outcome_of


@dataclass(frozen=True)
class Scored:
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
class Scorer:
    env: Environment
    endpoint: Endpoint
    store: MediaStore
    shares_store: bool
    split: str = "eval"
    seed: int = 0
    at_once: int = 32
    timeout_s: float = 600.0
    threads: Threads = field(default_factory=Threads)

    async def score_all(self, tasks: int) -> list[Scored]:
        gate = asyncio.Semaphore(self.at_once)

        async def one(task: int) -> Scored:
            async with gate:
                return await self.score(task)

        return list(await asyncio.gather(*map(one, range(tasks))))

    async def score(self, task: int) -> Scored:
        seed = _seed(self.seed, self.split, task)
        chat = EndpointChat(self.endpoint, self.store, random.Random(seed), seed, self.shares_store)
        env = self.env.pick(task, self.split)
        result, error = None, ""
        try:
            result = await within(self.timeout_s, self._play(env, task, chat), self.threads)
            outcome = outcome_of(result, env.name)
        except OutOfTime as problem:
            error = str(problem)
        except SightlineError as problem:
            error = str(problem)
        except Exception:  # user code: whatever it does costs this rollout only
            error = traceback.format_exc()
        return Scored(
            task,
            env.name,
            None if error else outcome.reward,
            {} if error else outcome.parts,
            error,
            bool(chat.cuts),
            chat.num_calls,
            chat.counted["tokens"],
        )

    async def _play(self, env: Environment, index: int, chat: EndpointChat) -> object:
        task = env.task(index, self.split)
        try:
            if inspect.iscoroutinefunction(env.rollout):
                return await env.rollout(task, chat)
            return await self.threads.play(partial(env.rollout, task), chat, name=f"eval-{index}")
        except Exception:  # user code: a rollout that was cut short has a worth of its own
            if not chat.cuts:
                raise
            return env.truncated(task)


def _seed(seed: int, split: str, task: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{split}.{task}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
