"""The files that commands read, and what may change between the halves of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import model_validator

from sightline.config import sections
from sightline.config.inference_section import InferenceConfig
from sightline.config.launch_section import LaunchConfig
from sightline.config.secret_refs import InvalidSetting
from sightline.config.section import ConfigSection, get_section_class
from sightline.errors import ResumeRefused

SERVERS_SHARE = 0.3
"""Of the memory of a GPU on which the servers of a run sample and its trainer trains."""
CONTEXTS_SHARE = 0.03
"""What the processes take beside what they allocate."""
MIN_TRAINER_SHARE = 0.1


class _TrainingFile(ConfigSection):
    """What both commands that train read."""

    model: sections.ModelConfig
    run: sections.RunConfig = sections.RunConfig()
    media: sections.MediaConfig = sections.MediaConfig()
    algorithm: sections.AlgorithmConfig = sections.AlgorithmConfig()
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

    @model_validator(mode="after")
    def _can_be_exact(self) -> Self:
        for name, why in self._inexact().items() if self.model.exact else ():
            raise InvalidSetting(
                f"[model] exact = true with {name}: {why}", "change one of the two settings"
            )
        return self

    def _inexact(self) -> dict[str, str]:
        """Settings with which sampler and trainer cannot be equal bit for bit, and why."""
        found = {}
        if self.lora.rank:
            found["[lora] rank"] = "a sampler adds the adapters up before it multiplies"
        if self.model.dtype != "float32" and self.trainer.master_dtype == "float32":
            found['[trainer] master_dtype = "float32"'] = (
                "weights that are rounded as they are gathered give other bits; with "
                f'dtype = "{self.model.dtype}", which is for GPUs, it takes master_dtype = "model"'
            )
        return found


class RunFile(_TrainingFile):
    """What `sightline rl` reads."""

    env: sections.EnvConfig
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    filters: sections.FiltersConfig = sections.FiltersConfig()
    orchestrator: sections.OrchestratorConfig = sections.OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: sections.LoggingConfig = sections.LoggingConfig()

    @property
    def server_names(self) -> tuple[str, ...]:
        """The processes that are servers of the run's own."""
        numbers = range(0 if self.inference.servers else self.launch.num_servers)
        return tuple(f"server-{number}" if number else "server" for number in numbers)

    @property
    def server_memory_share(self) -> float:
        """Share of its GPU's memory that each server may take; 0 is what its engine takes alone."""
        given = self.inference.gpu_memory_utilization
        if given or not any(map(self._has_servers_gpu, range(self.trainer.ranks))):
            return given
        return SERVERS_SHARE / self._num_servers

    def get_trainer_memory_share(self, rank: int) -> float:
        """Share of its GPU's memory that a rank may take; 0 is all of it."""
        if not self._has_servers_gpu(rank):
            return 0.0
        left = 1 - CONTEXTS_SHARE - self.server_memory_share * self._num_servers
        return max(left, MIN_TRAINER_SHARE)

    @property
    def _num_servers(self) -> int:
        return len(self.server_names) + bool(self.eval.every)

    def _has_servers_gpu(self, rank: int) -> bool:
        """Whether a rank has the GPU of the run's own servers, where there is one."""
        if not self.server_names or self.launch.has_other_machines:
            return False
        of_servers, of_trainer = self.inference.device, self.trainer.device
        if "cpu" in (of_servers, of_trainer):
            return False
        return (of_servers.partition(":")[2] or "0") == (of_trainer.partition(":")[2] or str(rank))

    def _inexact(self) -> dict[str, str]:
        found, inference = super()._inexact(), self.inference
        if inference.keep_kv_over_updates:
            found["[inference] keep_kv_over_updates"] = (
                "tokens are sampled on keys and values of other weights"
            )
        kinds = {d.split(":")[0] for d in (inference.device, self.trainer.device)} - {"auto"}
        if len(kinds) > 1:
            found["[inference] device and [trainer] device of two kinds"] = "each rounds as it does"
        return found


class SftFile(_TrainingFile):
    """What `sightline sft` reads."""

    sft: sections.SftConfig
    env: sections.EnvConfig | None = None
    data: sections.DataConfig | None = None

    def _inexact(self) -> dict[str, str]:
        return {"sft": "nothing is sampled", **super()._inexact()}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.data is None):
            raise InvalidSetting(
                "conversations come from [env] or from [data], one of them",
                "remove one of the sections, or add one",
            )
        return self


AnyRun = TypeVar("AnyRun", RunFile, SftFile)
_PATHS = (
    ("model", "path"), ("media", "root"), ("media", "cache_dir"), ("data", "path"),
    ("algorithm", "teacher"), ("sft", "output_dir"),
)  # fmt: skip


def resolve_paths(file: AnyRun) -> AnyRun:
    """The run file with absolute paths, for code of an environment may change its folder."""
    update: dict[str, ConfigSection] = {}
    for section, name in _PATHS:
        found = getattr(file, section, None)
        path = getattr(found, name, "")
        is_hub_id = name in ("path", "teacher") and not Path(path).exists()
        is_place = bool(path) and not is_hub_id and "://" not in path
        if isinstance(found, ConfigSection) and is_place:
            absolute = str(Path(path).expanduser().absolute())
            update[section] = update.get(section, found).model_copy(update={name: absolute})
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
