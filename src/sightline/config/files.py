"""The files that commands read, and what may change between the halves of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import model_validator

from sightline.config import sections
from sightline.config.secret_refs import InvalidSetting
from sightline.config.sections import ConfigSection, get_section_class
from sightline.errors import ResumeRefused


class _TrainingFile(ConfigSection):
    """What both commands that train read."""

    model: sections.ModelConfig
    run: sections.RunConfig = sections.RunConfig()
    media: sections.MediaConfig = sections.MediaConfig()
    trainer: sections.TrainerConfig = sections.TrainerConfig()
    lora: sections.LoraConfig = sections.LoraConfig()

    @model_validator(mode="after")
    def _trains_what_it_adapts(self) -> Self:
        if self.lora.vision_targets and not (self.lora.rank and self.model.train_vision):
            raise InvalidSetting(
                "[lora] vision_targets needs a rank, and [model] train_vision = true",
                "set both, or remove vision_targets",
            )
        if self.lora.publish == "adapter" and not self.lora.rank:
            raise InvalidSetting(
                '[lora] publish = "adapter" needs a rank', 'set [lora] rank, or publish = "merged"'
            )
        return self


class RunFile(_TrainingFile):
    """What `sightline rl` reads."""

    env: sections.EnvConfig
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    filters: sections.FiltersConfig = sections.FiltersConfig()
    orchestrator: sections.OrchestratorConfig = sections.OrchestratorConfig()
    inference: sections.InferenceConfig = sections.InferenceConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    logging: sections.LoggingConfig = sections.LoggingConfig()


class SftFile(_TrainingFile):
    """What `sightline sft` reads."""

    sft: sections.SftConfig
    env: sections.EnvConfig | None = None
    data: sections.DataConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.data is None):
            raise InvalidSetting(
                "conversations come from [env] or from [data], one of them",
                "remove one of the sections, or add one",
            )
        return self


AnyRun = TypeVar("AnyRun", RunFile, SftFile)
_PATHS = (("model", "path"), ("media", "root"), ("data", "path"), ("sft", "output_dir"))


def resolve_paths(file: AnyRun) -> AnyRun:
    """The run file with absolute paths, for code of an environment may change its folder."""
    update = {}
    for section, name in _PATHS:
        found = getattr(file, section, None)
        path = getattr(found, name, "")
        is_hub_id = name == "path" and not Path(path).exists()
        if isinstance(found, ConfigSection) and path and not is_hub_id:
            update[section] = found.model_copy(update={name: str(Path(path).absolute())})
    return file.model_copy(update=update)


def iter_settings(kind: type[ConfigSection]) -> Iterator[tuple[str, str, Any]]:
    """Each setting as (section, name, field)."""
    for section, outer in kind.model_fields.items():
        for name, field in get_section_class(outer.annotation).model_fields.items():
            yield section, name, field


def check_resume(old: AnyRun, new: AnyRun) -> None:
    """Refuses, by name, what cannot change between the halves of a run."""
    for section, name, field in iter_settings(type(old)):
        before = getattr(getattr(old, section), name, None)
        after = getattr(getattr(new, section), name, None)
        if before == after:
            continue
        why, schedule = "", old.trainer.lr_schedule
        if (section, name) == ("run", "steps") and schedule != "constant":
            why = (
                ", and the learning rate of every step depends on it "
                f"([trainer] lr_schedule = {schedule!r})"
            )
        if why or not (field.json_schema_extra or {}).get("mutable"):
            raise ResumeRefused(
                f"[{section}] {name} was {before!r} and is now {after!r}{why}",
                "resume with the old value, or start a new run",
            )
