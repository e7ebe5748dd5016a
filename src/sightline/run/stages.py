"""Stages of a rollout: stretches of time with a name, inside one another, in several processes.

    rollout                       a worker
    ├── environment               between one answer and the next question
    ├── judge
    └── turn
        ├── render
        └── generate              a request; one more for each server that was tried
            └── serve             the server, which finds its parent in the request's headers
                └── queue, materialize, prefill, decode: what its engine knows

`Stage` and `StageRecorder` keep nothing: code that nobody gave others has `NO_STAGE` and
`NO_STAGE_RECORDER`. `run.otel_spans` exports stages as spans of OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

Attribute = str | int | float | bool
Headers = Mapping[str, str]


@dataclass(frozen=True)
class ExportLimits:
    """How many spans wait for a collector, and how long anything waits for it."""

    queue_size: int = 4096
    batch_size: int = 512
    interval_ms: int = 1000
    export_timeout_s: float = 5.0
    close_timeout_s: float = 5.0


DEFAULT_LIMITS = ExportLimits()


class Stage:
    """One stage that is under way. Left by an exception, it has failed."""

    @property
    def headers(self) -> Headers:
        """What a request carries, so that stages of another process go on from this one."""
        return {}

    def begin(self, name: str, **attributes: Attribute) -> Stage:
        return self

    def add_finished(self, name: str, began: float, ended: float, **attributes: Attribute) -> None:
        """Adds a stage inside this one that is over; seconds since 1970."""

    def note(self, **attributes: Attribute) -> None: ...

    def fail(self, why: str) -> None: ...

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type | None, error: object, trace: object) -> None: ...


NO_STAGE = Stage()
CURRENT_STAGE: ContextVar[Stage] = ContextVar("stage", default=NO_STAGE)
"""The rollout's own, for what an environment calls: its code passes none on."""


class StageRecorder:
    """Where the stages of a process go."""

    def begin(self, name: str, headers: Headers | None = None, **attributes: Attribute) -> Stage:
        """The outermost stage of this process, inside the one that `headers` name, if they do."""
        return NO_STAGE

    def close(self) -> None:
        """Takes a few seconds at most, whoever listens."""


NO_STAGE_RECORDER = StageRecorder()
