"""The interface of sinks, and the status lines of the process that feeds them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sightline.errors import ConfigError

SINKS = ("tensorboard", "wandb", "trackio")
"""Each is a module of this folder, and an extra of the package."""
CLOSE_TIMEOUT_S = 20.0
"""How long a sink may take to finish once the run is over."""
STATUS_PREFIX, STATUS_OK = "sink ", "fed"
"""The last lines of the process that feeds sinks: `sink NAME: fed`, or what went wrong."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The identity of a run for sinks."""

    name: str
    """The name of its folder, which other runs may share."""
    id: str
    """Unique among all runs, and the same in every feeding."""
    settings: dict[str, Any]
    """Sections of the run file."""

    @property
    def unique_name(self) -> str:
        return f"{self.name}-{self.id}"


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A reduced copy of an image, as PNG."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout as a row of a table."""

    trace_id: str
    verdict: str
    reward: float | None
    text: str
    thumbs: tuple[Thumbnail, ...]


class Sink(Protocol):
    """A destination for metrics. One thread calls it, and its methods may block."""

    def numbers(self, step: int, values: dict[str, float]) -> None: ...

    def samples(self, step: int, samples: list[RolloutRow]) -> None: ...

    def close(self) -> None: ...


def check_sinks(names: Sequence[str]) -> None:
    """Raise for unknown sinks and for sinks whose package is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"there is no sink {name!r}", f"choose from {', '.join(SINKS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"the sink {name!r} needs the package {name}", f"pip install 'sightline-rl[{name}]'"
            )
