"""What the server asks of an engine. Both engines have this shape, and know nothing of HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sightline.errors import EngineError
from sightline.inference.busy_intervals import BusyIntervals
from sightline.wire.generate import VersionSpan
from sightline.wire.weights import Manifest


@dataclass(slots=True)
class RequestTimeline:
    """What a request has been through: each stage from the end of the one before it."""

    since: float = field(default_factory=time.time)
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, begin and end, in seconds since 1970."""

    def end(self, name: str) -> None:
        now = time.time()
        self.stages.append((name, self.since, now))
        self.since = now


class EngineRequest(Protocol):
    """One choice of a request: its prompt, and what the engine has said of it when it is done."""

    prompt: np.ndarray
    owner: Any
    """Whatever the server needs to find its client again."""
    cached_tokens: int
    prompt_logprobs: np.ndarray | None
    tokens: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: str
    """stop or length; abort for a request that was cancelled."""
    error: EngineError | None
    timeline: RequestTimeline

    def pixel_digests(self) -> list[str]: ...


Deliver = Callable[[list[Any]], None]
"""Takes requests that are done, on whatever thread the engine has."""


class Engine(Protocol):
    busy: BusyIntervals
    on_fatal_error: Callable[[], None]
    """Called when the engine has failed beyond repair."""

    @property
    def manifest(self) -> Manifest:
        """Of the weights in use."""
        ...

    def start(self, deliver: Deliver) -> None: ...

    def stop(self) -> None:
        """Refuses what is unfinished, and ends."""
        ...

    def join(self, timeout_s: float) -> None:
        """Returns when the engine has ended, and gives back its threads."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def submit(self, requests: list[Any]) -> None: ...

    def cancel(self, request: Any) -> None: ...

    def adopt(self, path: Path) -> Manifest:
        """Takes the weights of a manifest, and returns when it has. Not on the event loop."""
        ...

    def totals(self) -> dict[str, float]:
        """Counters since the start."""
        ...

    def now(self) -> dict[str, float]:
        """Gauges."""
        ...
