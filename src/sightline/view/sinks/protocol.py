"""What a sink is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SINKS = ("tensorboard", "wandb", "trackio")
"""Each is a module of this folder, and an extra of the package."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small copy of an image, as PNG."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout, for a table."""

    trace_id: str
    verdict: str
    reward: float | None
    text: str
    thumbs: tuple[Thumbnail, ...]


class Sink(Protocol):
    """Its methods are called by one thread, and may take as long as they like."""

    def numbers(self, step: int, values: dict[str, float]) -> None: ...

    def samples(self, step: int, samples: list[RolloutRow]) -> None: ...

    def close(self) -> None: ...
