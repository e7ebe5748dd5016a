"""The rollouts of one task."""

from __future__ import annotations

from dataclasses import dataclass, field

from sightline.trace import Trace


@dataclass
class Group:
    index: int
    """The group's number, and the index of its task."""
    traces: list[Trace] = field(default_factory=list)
    """Finished or broken rollouts; a broken one has an error."""

    @property
    def id(self) -> str:
        return f"g{self.index}"

    @property
    def rewards(self) -> list[float]:
        return [trace.reward for trace in self.traces if trace.reward is not None]


def rollout_id(group: int, index: int) -> str:
    return f"g{group}.{index}"
