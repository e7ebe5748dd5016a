"""The rollouts of one task."""

from __future__ import annotations

from dataclasses import dataclass, field

from sightline.trace import Trace


@dataclass
class Group:
    index: int
    """Also the index of its task."""
    traces: list[Trace] = field(default_factory=list)
    """Finished or broken; a broken one has an error."""

    @property
    def id(self) -> str:
        return f"g{self.index}"


def rollout_id(group: int, index: int) -> str:
    return f"g{group}.{index}"
