"""The files that commands read, and what may change between the halves of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sightline.config.inference import Inference
from sightline.config.monitor import Monitor
from sightline.config.section import Section
from sightline.config.sections import (
    Env,
    Eval,
    Filters,
    Media,
    Model,
    Orchestrator,
    Rollout,
    Run,
    Sft,
)
from sightline.config.trainer import Trainer
from sightline.errors import ResumeRefused


class RunFile(Section):
    """What `sightline rl` reads."""

    model: Model
    env: Env
    run: Run = Run()
    media: Media = Media()
    rollout: Rollout = Rollout()
    filters: Filters = Filters()
    orchestrator: Orchestrator = Orchestrator()
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    eval: Eval = Eval()
    monitor: Monitor = Monitor()


class SftFile(Section):
    """What `sightline sft` reads."""

    model: Model
    env: Env
    sft: Sft
    run: Run = Run()
    media: Media = Media()
    trainer: Trainer = Trainer()


def settings(kind: type[Section]) -> Iterator[tuple[str, str, Any]]:
    """Each setting as (section, name, field)."""
    for section, outer in kind.model_fields.items():
        inner = outer.annotation
        assert isinstance(inner, type) and issubclass(inner, Section)
        for name, field in inner.model_fields.items():
            yield section, name, field


def check_resume(old: RunFile, new: RunFile) -> None:
    """Refuses, by name, what cannot change between the halves of a run."""
    for section, name, field in settings(RunFile):
        before = getattr(getattr(old, section), name)
        after = getattr(getattr(new, section), name)
        if before == after:
            continue
        if name == "steps" and section == "run" and old.trainer.schedule != "constant":
            raise ResumeRefused(
                f"[run] steps was {before} and is now {after}, and the learning rate of every "
                f"step depends on it ([trainer] schedule = {old.trainer.schedule!r})",
                "resume with the old value, or start a new run",
            )
        if not (field.json_schema_extra or {}).get("free"):
            raise ResumeRefused(
                f"[{section}] {name} was {before!r} and is now {after!r}",
                "resume with the old value, or start a new run",
            )
