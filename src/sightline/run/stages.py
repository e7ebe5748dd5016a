"""Stages of a rollout: named, nested time intervals, across several processes.

    rollout                       a worker
    ├── environment               from an answer to the next request
    ├── judge
    └── turn
        ├── render
        └── generate              a request; one for each server that was tried
            └── serve             the server, which finds its parent in the request's headers
                └── queue, materialize, prefill, decode: reported by the engine

`Stage` and `StageRecorder` record nothing; they serve as defaults (`NO_STAGE`,
`NO_STAGE_RECORDER`). `run.otel_spans` exports stages as OpenTelemetry spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

Attribute = str | int | float | bool
Headers = Mapping[str, str]


@dataclass(frozen=True)
class ExportLimits:
    """Queue sizes and timeouts of the export."""

    queue_size: int = 4096
    batch_size: int = 512
    interval_ms: int = 1000
    export_timeout_s: float = 5.0
    close_timeout_s: float = 5.0


DEFAULT_LIMITS = ExportLimits()


class Stage:
    """A stage in progress. An exception that leaves it marks it as failed."""

    @property
    def headers(self) -> Headers:
        """Headers for a request, which make this stage the parent in another process."""
        return {}

    def begin(self, name: str, **attributes: Attribute) -> Stage:
        return self

    def add_finished(self, name: str, began: float, ended: float, **attributes: Attribute) -> None:
        """Add a finished stage inside this one; times are seconds since 1970."""

    def note(self, **attributes: Attribute) -> None: ...

    def fail(self, why: str) -> None: ...

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type | None, error: object, trace: object) -> None: ...


NO_STAGE = Stage()
CURRENT_STAGE: ContextVar[Stage] = ContextVar("stage", default=NO_STAGE)
"""The stage of the current rollout, for library code that an environment calls."""


class StageRecorder:
    """Records the stages of a process."""

    def begin(self, name: str, headers: Headers | None = None, **attributes: Attribute) -> Stage:
        """Begin an outermost stage of this process, inside the one that `headers` name, if any."""
        return NO_STAGE

    def close(self) -> None:
        """Flush what is left; takes a few seconds at most."""


NO_STAGE_RECORDER = StageRecorder()
