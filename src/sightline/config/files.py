"""The files that commands read, and what may change between the halves of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, TypeGuard, TypeVar, get_args

from pydantic import model_validator

from sightline.config.inference import Inference
from sightline.config.lora import Lora
from sightline.config.monitor import Monitor
from sightline.config.section import Section
from sightline.config.sections import (
    Data,
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


class _Training(Section):
    """What both commands that train read."""

    model: Model
    run: Run = Run()
    media: Media = Media()
    trainer: Trainer = Trainer()
    lora: Lora = Lora()

    @model_validator(mode="after")
    def _trains_what_it_adapts(self) -> Self:
        if self.lora.vision_targets and not (self.lora.rank and self.model.train_vision):
            raise ValueError("[lora] vision_targets needs a rank, and [model] train_vision = true")
        if self.lora.publish == "adapter" and not self.lora.rank:
            raise ValueError('[lora] publish = "adapter" needs a rank')
        return self


class RunFile(_Training):
    """What `sightline rl` reads."""

    env: Env
    rollout: Rollout = Rollout()
    filters: Filters = Filters()
    orchestrator: Orchestrator = Orchestrator()
    inference: Inference = Inference()
    eval: Eval = Eval()
    monitor: Monitor = Monitor()


class SftFile(_Training):
    """What `sightline sft` reads."""

    sft: Sft
    env: Env | None = None
    data: Data | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.data is None):
            raise ValueError("conversations come from [env] or from [data], one of them")
        return self


AnyRun = TypeVar("AnyRun", RunFile, SftFile)


def settings(kind: type[Section]) -> Iterator[tuple[str, str, Any]]:
    """Each setting as (section, name, field)."""
    for section, outer in kind.model_fields.items():
        for name, field in section_of(outer.annotation).model_fields.items():
            yield section, name, field


def section_of(annotation: Any) -> type[Section]:
    """The section that a field of a file holds, whether it may be left out or not."""
    [section] = [one for one in (annotation, *get_args(annotation)) if _is_section(one)]
    return section


def _is_section(kind: Any) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def check_resume(old: AnyRun, new: AnyRun) -> None:
    """Refuses, by name, what cannot change between the halves of a run."""
    for section, name, field in settings(type(old)):
        before = getattr(getattr(old, section), name, None)
        after = getattr(getattr(new, section), name, None)
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
