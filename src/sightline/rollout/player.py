"""Plays one task once: makes the chat, runs the environment's code, records what it earned."""

from __future__ import annotations

import inspect
import math
import numbers
import random
import time
import traceback
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from sightline.envs import Environment, Outcome, Task
from sightline.errors import EngineError, EnvironmentFailed, SightlineError
from sightline.media import ImageIngestor, MediaStore
from sightline.message import ImageResolver
from sightline.render import Renderer
from sightline.rollout.chat import RolloutChat
from sightline.rollout.client import GenerateClient
from sightline.rollout.intercept import InterceptionServer
from sightline.rollout.put_pool import PendingPuts, PutPool
from sightline.rollout.rollout_threads import RolloutThreads
from sightline.rollout.timeout import CLEANUP_GRACE_S, RolloutTimeout, run_with_timeout
from sightline.run.stages import CURRENT_STAGE, NO_STAGE_RECORDER, Stage, StageRecorder
from sightline.trace import Trace, encode_trace
from sightline.wire.control import RolloutRequest, RolloutResult

TRUNCATED = "truncated"
"""The kind of a rollout that was cut short; no error, and its reward may count."""


@dataclass
class RolloutPlayer:
    """Everything that a rollout needs, shared by all rollouts of a worker."""

    env: Environment
    renderer: Renderer
    store: MediaStore
    client: GenerateClient
    modality: str
    max_tokens: int
    timeout_s: float
    servers: tuple[str, ...] = ()
    """Where there are several; `client` speaks to the first of them."""
    max_model_len: int = 0
    max_turns: int = 0
    grace_s: float = CLEANUP_GRACE_S
    """For the clean-up of a rollout that is over its time."""
    threads: RolloutThreads = field(default_factory=RolloutThreads)
    resolver: ImageResolver | None = None
    """Takes the images of agents in; left out, one that knows data: and media: only."""
    stages: StageRecorder = NO_STAGE_RECORDER
    """Where the stages of its rollouts go."""

    def __post_init__(self) -> None:
        self.put_pool = PutPool(self.store)
        # Not the loop's own executor, which is user code's: what hangs there holds up nobody else.
        self._pool = ThreadPoolExecutor(thread_name_prefix="chat")
        self.interception = InterceptionServer(self.resolver or ImageIngestor(self.store))
        self._chats: dict[str, RolloutChat] = {}
        self._clients = {self.client.base_url: self.client}

    @property
    def held_bytes(self) -> int:
        """What the rollouts under way take in memory."""
        chats = sum(chat.held_bytes for chat in self._chats.values())
        return chats + self.interception.held_bytes

    async def close(self) -> None:
        await self.interception.close()
        for client in self._clients.values():
            await client.close()
        self.put_pool.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def play(self, play: RolloutRequest) -> RolloutResult:
        trace = Trace(
            id=play.rollout_id,
            group_id=play.group_id,
            env=self.env.name,
            task=play.task,
            split=play.split,
            seed=play.seed,
            temperature=play.temperature,
            started=time.time(),
        )
        with self.stages.begin(
            "rollout",
            rollout_id=play.rollout_id,
            group_id=play.group_id,
            task=play.task,
            split=play.split,
            seed=play.seed,
        ) as stage:
            chat = self._build_chat(play, trace, stage)
            outer = CURRENT_STAGE.set(stage)
            try:
                await self._play_recorded(play, chat)
            finally:
                CURRENT_STAGE.reset(outer)
                chat.end_environment_stage()
                _annotate_stage(stage, trace)
        return RolloutResult(
            rollout_id=play.rollout_id,
            group_id=play.group_id,
            trace=encode_trace(trace),
            wire=self._wire_counts() | asdict(self.interception.counts),
            held_bytes=chat.held_bytes,
        )

    async def _play_recorded(self, play: RolloutRequest, chat: RolloutChat) -> None:
        """Plays, and keeps on the trace what came of it."""
        trace, error, kind = chat.trace, "", ""
        self._chats[play.rollout_id] = chat
        try:
            _record_outcome(trace, await self._run_rollout(play, chat))
            if chat.truncated:
                kind, trace.truncated, trace.limit = TRUNCATED, True, chat.truncated
        except RolloutTimeout as problem:
            error, kind = str(problem), "timeout"
        except EngineError as problem:
            error, kind = str(problem), problem.kind
        except SightlineError as problem:
            error, kind = str(problem), type(problem).__name__
        except Exception:  # user code: whatever it does costs this rollout only
            error, kind = traceback.format_exc(), EnvironmentFailed.__name__
        finally:
            self._chats.pop(play.rollout_id, None)
        trace.error, trace.error_kind = error, kind
        trace.ended = time.time()

    def _wire_counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for client in self._clients.values():
            total.update(asdict(client.counts))
        return dict(total)

    def _get_client(self, play: RolloutRequest) -> GenerateClient:
        """A rollout stays with one server, which keeps what it has computed of it."""
        servers = self.servers or (self.client.base_url,)
        server = play.server or servers[zlib.crc32(play.rollout_id.encode()) % len(servers)]
        if server not in self._clients:
            self._clients[server] = self.client.for_server(server)
        return self._clients[server]

    def _build_chat(self, play: RolloutRequest, trace: Trace, stage: Stage) -> RolloutChat:
        return RolloutChat(
            trace=trace,
            renderer=self.renderer,
            store=self.store,
            pending=PendingPuts(self.put_pool),
            client=self._get_client(play),
            modality=self.modality,
            temperature=play.temperature,
            max_tokens=self.max_tokens,
            rng=random.Random(play.seed),
            seed=play.seed,
            pool=self._pool,
            max_model_len=self.max_model_len,
            max_turns=self.max_turns,
            exchanged=play.exchanged,
            stage=stage,
        )

    async def _run_rollout(self, play: RolloutRequest, chat: RolloutChat) -> Outcome:
        async with self.interception.serve_rollout(chat):
            work = self._run_user_code(play, chat)
            result = await run_with_timeout(self.timeout_s, work, self.threads, self.grace_s)
        return to_outcome(result, chat.trace.env)

    async def _run_user_code(self, play: RolloutRequest, chat: RolloutChat) -> Any:
        env = self.env.choose_environment(play.task, play.split)
        chat.trace.env = env.name
        task = env.task(play.task, play.split)
        try:
            result = await self._play(env, task, chat, play.rollout_id)
        except Exception as error:  # user code: what followed from a failure is not its cause
            if chat.failure is not None:
                raise chat.failure from error
            if not chat.truncated:
                raise
            result = env.truncated(task)
        if chat.failure is not None:
            raise chat.failure
        # An image that was put and never sent may be a bad one all the same.
        await chat.pending.settle()
        return result

    async def _play(self, env: Environment, task: Task, chat: RolloutChat, name: str) -> Any:
        if inspect.iscoroutinefunction(env.rollout):
            return await env.rollout(task, chat)
        return await self.threads.play(partial(env.rollout, task), chat, name=name)


def to_outcome(result: object, name: str) -> Outcome:
    if isinstance(result, Outcome):
        outcome = result
    elif isinstance(result, dict):
        outcome = Outcome(reward=float(sum(result.values())), parts=dict(result))
    elif isinstance(result, numbers.Real):
        outcome = Outcome(reward=float(result))
    else:
        raise EnvironmentFailed(
            f"environment {name!r} returned a {type(result).__name__}",
            "return a number, a dict of named numbers, or an Outcome",
        )
    # Plain numbers from here on: an environment may well compute with numpy.
    outcome = Outcome(
        reward=float(outcome.reward),
        parts={str(part): float(value) for part, value in outcome.parts.items()},
        per_turn=None if outcome.per_turn is None else [float(v) for v in outcome.per_turn],
    )
    earned = [outcome.reward, *outcome.parts.values(), *(outcome.per_turn or ())]
    if not all(math.isfinite(number) for number in earned):
        raise EnvironmentFailed(
            f"environment {name!r} returned {outcome}", "return finite numbers only"
        )
    return outcome


def _annotate_stage(stage: Stage, trace: Trace) -> None:
    """What a rollout came to, on its stage."""
    stage.note(env=trace.env, turns=len(trace.turns), tokens=trace.num_tokens)
    if trace.reward is not None:
        stage.note(reward=trace.reward)
    if trace.error_kind:
        stage.note(error_kind=trace.error_kind)
    if trace.error:
        stage.fail(trace.error.strip().splitlines()[-1])


def _record_outcome(trace: Trace, outcome: Outcome) -> None:
    if outcome.per_turn is not None and len(outcome.per_turn) != len(trace.turns):
        raise EnvironmentFailed(
            f"{len(outcome.per_turn)} per_turn rewards for {len(trace.turns)} model calls",
            "give one per call, in order",
        )
    trace.reward = outcome.reward
    trace.rewards = outcome.parts
    trace.per_turn = outcome.per_turn
