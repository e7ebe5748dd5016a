"""Several environments in one run: each task belongs to one of them, drawn by weight."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence

from sightline.config import EnvConfig
from sightline.envs.protocol import Environment, load_environment
from sightline.errors import ConfigError


class EnvironmentMix(Environment):
    """Environments with weights; a task's index and split determine its environment."""

    name = "mix"

    def __init__(self, members: Sequence[tuple[Environment, float]]) -> None:
        names = [env.name for env, _ in members]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"[[env.mix]] has two environments called {name!r}",
                    "give one of them a `label`, because metrics are grouped by name",
                )
        self.members = [env for env, _ in members]
        self.shows_media = any(env.shows_media for env in self.members)
        self._stops = list(itertools.accumulate(weight for _, weight in members))

    def choose_environment(self, index: int, split: str) -> Environment:
        drawn = hashlib.blake2b(f"{split}:{index}".encode(), digest_size=8).digest()
        at = int.from_bytes(drawn, "big") / 2**64 * self._stops[-1]
        return self.members[min(bisect.bisect_right(self._stops, at), len(self.members) - 1)]


def build_environment(env: EnvConfig) -> Environment:
    """Build the environment, or the mix of environments, that `[env]` describes."""
    if not env.mix:
        return load_environment(env.name, env.args)
    members = []
    for share in env.mix:
        member = load_environment(share.name, share.args)
        if share.label:
            member.name = share.label
        members.append((member, share.weight))
    return EnvironmentMix(members)
