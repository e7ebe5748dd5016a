"""Adapter for environments of the verifiers library, which run unchanged on Sightline's endpoint.

    its harness --> its own interception --> chat.base_url (OpenAI API) --> trace

Tasks come from the library's taskset and rewards from its scoring. Each rollout has its own API
key, and therefore its own instance of the environment and its servers.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sightline.envs.protocol import Chat, Environment, Outcome, Task, import_extra
from sightline.errors import ConfigError, EnvironmentFailed


class VerifiersEnvironment(Environment):
    def __init__(
        self,
        env: dict[str, Any] | None = None,
        taskset: str = "",
        harness: str = "",
        runtime: str = "subprocess",
        sampling: dict[str, Any] | None = None,
        eval_every: int = 10,
        shows_media: bool = True,
    ) -> None:
        agents = import_extra("verifiers.v1.configs.agent", "verifiers")
        runtimes = import_extra("verifiers.v1.runtimes", "verifiers")
        loaders = import_extra("verifiers.v1.utils.loaders", "verifiers")
        if eval_every < 2:
            raise ConfigError(f"verifiers: [env.args] {eval_every=} is too small", "use 2 or more")
        values: dict[str, Any] = dict(env or {})
        if taskset:
            values["taskset"] = {**values.get("taskset", {}), "id": taskset}
        if harness:
            values["agent"] = {**values.get("agent", {}), "harness": {"id": harness}}
        try:
            self.config = loaders.resolve_env_config(values)
            # Agent programs run on this machine unless a role is configured differently.
            for role in agents.agent_config_fields(self.config):
                values[role] = {"runtime": {"type": runtime}, **values.get(role, {})}
            self.config = loaders.resolve_env_config(values)
            self._load = lambda: loaders.load_environment(self.config)
            self._source: Iterator[Any] = iter(self._load().taskset)
        except (ModuleNotFoundError, TypeError, ValueError) as error:
            raise ConfigError(
                f"verifiers: {error}",
                "set [env.args] taskset to an installed taskset. Its own configuration goes into "
                "[env.args.env]",
            ) from error
        self.name = f"verifiers:{self.config.env_id}"
        for role, spec in agents.agent_config_fields(self.config).items():
            if not runtimes.runtime_is_local(spec.runtime):
                raise ConfigError(
                    f"{self.name}: role {role!r} runs remotely ({spec.runtime.type}), but the "
                    "endpoint of a rollout listens on this machine only",
                    "set [env.args] runtime to 'subprocess' or 'docker'",
                )
        self.shows_media = shows_media
        self.sampling = sampling or {}
        self.eval_every = eval_every
        self._tasks_read: list[Any] = []
        self._tasks_lock = threading.Lock()

    def task(self, index: int, split: str) -> Task:
        """Return a task. Every `eval_every`-th is for evaluation. Finite tasksets wrap around."""
        if split == "eval":
            place = index * self.eval_every
        else:
            rounds, rest = divmod(index, self.eval_every - 1)
            place = rounds * self.eval_every + rest + 1
        return Task(index, split, self._task_at(place, split == "eval"))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        import verifiers.v1 as vf

        # verifiers reads the key from the environment variable named in its config.
        variable = f"SIGHTLINE_KEY_{id(chat)}"
        os.environ[variable] = chat.api_key
        try:
            context = vf.ModelContext(
                model="sightline",
                client=vf.EvalClientConfig(base_url=chat.base_url, api_key_var=variable),
                sampling=vf.Sampling(**self.sampling),
            )
            env = self._load()
            async with env.serving():
                episode = await env.run_episode(task.data, context)
        finally:
            os.environ.pop(variable, None)
        return self._outcome(episode)

    def _outcome(self, episode: Any) -> Outcome:
        problems = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        if not episode.ok:
            reasons = "; ".join(f"{e.type}: {e.message}" for e in problems) or "unknown error"
            raise EnvironmentFailed(
                f"{self.name}: the episode failed: {reasons}"[:2000],
                "reproduce it with verifiers' own command against any endpoint",
            )
        rewards: dict[str, float] = defaultdict(float)
        for name, reward in (pair for trace in episode.traces for pair in trace.rewards.items()):
            if reward is not None:
                rewards[name] += float(reward.value)
        metrics = {
            name: float(value)
            for trace in episode.traces
            for name, value in trace.metrics.items()
            if value is not None
        }
        return Outcome(reward=sum(rewards.values()), parts={**rewards, **metrics})

    def _task_at(self, place: int, for_eval: bool) -> Any:
        with self._tasks_lock:
            known = self._tasks_read
            known += itertools.islice(self._source, max(place + 1 - len(known), 0))
            if place < len(known):
                return known[place]
            split = [i for i in range(len(known)) if (i % self.eval_every == 0) == for_eval]
            if not split:
                raise EnvironmentFailed(
                    f"{self.name}: its taskset has {len(known)} tasks, which leaves none for "
                    f"{'evaluation' if for_eval else 'training'}",
                    "add tasks, or lower [env.args] eval_every",
                )
            return known[split[place % len(split)]]


ENVIRONMENT = VerifiersEnvironment
