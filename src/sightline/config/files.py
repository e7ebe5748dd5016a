"""Run files of `sightline rl` and `sightline sft`, and the settings that a resume may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import model_validator

from sightline.config import sections
from sightline.config.algorithm_section import AlgorithmConfig
from sightline.config.process_sections import InferenceConfig, LaunchConfig
from sightline.config.secret_refs import InvalidSetting
from sightline.config.section import ConfigSection, get_section_class
from sightline.errors import ResumeRefused

SERVERS_SHARE = 0.3
"""Fraction of a GPU's memory for a run's servers if its trainer uses the same GPU."""
CONTEXTS_SHARE = 0.03
"""Fraction of a GPU's memory that CUDA contexts take."""
MIN_TRAINER_SHARE = 0.1
MISMATCH_LIMITS = {"float32": 1e-6, "bfloat16": 0.015}
"""Mismatch KL per token that rounding cannot explain. Healthy runs have 1e-14 and up to 1e-3."""
OLD_KV_MISMATCH = 0.1
"""The same limit for servers that keep the KV cache of old weights."""


class _TrainingFile(ConfigSection):
    """Sections that both commands share."""

    model: sections.ModelConfig
    run: sections.RunConfig = sections.RunConfig()
    media: sections.MediaConfig = sections.MediaConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: sections.TrainerConfig = sections.TrainerConfig()
    lora: sections.LoraConfig = sections.LoraConfig()

    def with_values(self, section: str, **values: Any) -> Self:
        """Return a copy with these settings of a section, which are not validated again."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora.vision_targets and not (self.lora.rank and self.model.train_vision):
            raise InvalidSetting(
                "[lora] vision_targets requires [lora] rank and [model] train_vision = true",
                "set both, or remove vision_targets",
            )
        return self

    @model_validator(mode="after")
    def _check_divided_modules(self) -> Self:
        trainer = self.trainer
        others = {
            "[lora] rank": self.lora.rank,
            "[model] exact": self.model.exact,
            "[trainer] compile_backend": trainer.compile_backend,
        }
        for setting in ("expert_parallel", "tensor_parallel"):
            for name, value in others.items() if getattr(trainer, setting) > 1 else ():
                if value:
                    raise InvalidSetting(
                        f"[trainer] {setting} = {getattr(trainer, setting)} does not work with "
                        f"{name} = {value}",
                        f"set [trainer] {setting} = 1, or remove {name}",
                    )
        if trainer.tensor_parallel > 1 and trainer.context_parallel > 1:
            raise InvalidSetting(
                f"[trainer] tensor_parallel = {trainer.tensor_parallel} does not work with "
                f"context_parallel = {trainer.context_parallel}: both divide the heads",
                "set one of them to 1",
            )
        return self

    @model_validator(mode="after")
    def _check_exact(self) -> Self:
        for setting, reason in self._find_inexact().items() if self.model.exact else ():
            raise InvalidSetting(
                f"[model] exact = true does not work with {setting}: {reason}",
                "change one of the two settings",
            )
        return self

    def _find_inexact(self) -> dict[str, str]:
        """Return the settings that prevent bit-identical logprobs, each with the reason."""
        reasons = {}
        if self.lora.rank:
            reasons["[lora] rank"] = "adapters are not computed in exact arithmetic"
        return reasons


class RunFile(_TrainingFile):
    """The run file of `sightline rl`."""

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
        """Names of the server processes that the run starts."""
        numbers = range(0 if self.inference.servers else self.launch.num_servers)
        return tuple(f"server-{number}" if number else "server" for number in numbers)

    @property
    def mismatch_limit(self) -> float:
        """The maximum mismatch KL per token. 0 means no limit."""
        if self.orchestrator.max_mismatch is not None:
            return self.orchestrator.max_mismatch
        if self.inference.keep_kv_over_updates:
            return OLD_KV_MISMATCH
        return MISMATCH_LIMITS[self.model.dtype]

    @property
    def server_memory_share(self) -> float:
        """Fraction of its GPU's memory that each server may use; 0 lets the engine decide."""
        share = self.inference.gpu_memory_utilization or 0.0
        return share if share or not self.shares_gpu else SERVERS_SHARE / self.num_servers

    @property
    def shares_gpu(self) -> bool:
        """True if a trainer rank and servers of the run use the same GPU, if there is one."""
        return any(map(self._has_servers_gpu, range(self.trainer.ranks)))

    def get_trainer_memory_share(self, rank: int) -> float:
        """Return the fraction of its GPU's memory that a rank may use. 0 means all of it."""
        if not self._has_servers_gpu(rank):
            return 0.0
        left = 1 - CONTEXTS_SHARE - self.server_memory_share * self.num_servers
        return max(left, MIN_TRAINER_SHARE)

    @property
    def num_servers(self) -> int:
        """Number of servers that the run starts, including that of `[eval] every`."""
        return len(self.server_names) + bool(self.eval.every)

    @property
    def server_gpus(self) -> range:
        """Numbers of the GPUs of each server that the run starts."""
        first = int(self.inference.device.partition(":")[2] or 0)
        parts, copies = self.inference.tensor_parallel_size, self.inference.data_parallel_size
        return range(first, first + parts * copies)

    def _has_servers_gpu(self, rank: int) -> bool:
        """Return whether a rank shares a GPU with servers that the run starts."""
        if not self.server_names or self.launch.has_other_machines:
            return False
        if "cpu" in (self.inference.device, self.trainer.device):
            return False
        return int(self.trainer.device.partition(":")[2] or rank) in self.server_gpus

    def _find_inexact(self) -> dict[str, str]:
        reasons, inference = super()._find_inexact(), self.inference
        if inference.keep_kv_over_updates:
            reasons["[inference] keep_kv_over_updates"] = (
                "it samples with a KV cache of old weights"
            )
        kinds = {d.split(":")[0] for d in (inference.device, self.trainer.device)} - {"auto"}
        if len(kinds) > 1:
            reasons["different [inference] device and [trainer] device"] = "they round differently"
        return reasons


class SftFile(_TrainingFile):
    """The run file of `sightline sft`."""

    sft: sections.SftConfig
    env: sections.EnvConfig | None = None
    data: sections.DataConfig | None = None

    def _find_inexact(self) -> dict[str, str]:
        return {"`sightline sft`": "it samples nothing", **super()._find_inexact()}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.data is None):
            raise InvalidSetting(
                "conversations must come from either [env] or [data]",
                "keep one of the two sections",
            )
        has_pairs = self.data is not None and bool(self.data.rejected_column)
        if has_pairs != (self.algorithm.name == "dpo"):
            raise InvalidSetting(
                f"[data] rejected_column is {'set' if has_pairs else 'missing'}, and [algorithm] "
                f"name is {self.algorithm.name!r}",
                'set rejected_column and name = "dpo" together: DPO trains on pairs',
            )
        return self


AnyRun = TypeVar("AnyRun", RunFile, SftFile)
_PATHS = (
    ("model", "path"), ("media", "root"), ("media", "cache_dir"), ("data", "path"),
    ("algorithm", "teacher"), ("sft", "output_dir"),
)  # fmt: skip


def resolve_paths(file: AnyRun) -> AnyRun:
    """Return the run file with absolute paths, because environments may change the directory."""
    for section, name in _PATHS:
        path = getattr(getattr(file, section, None), name, "")
        is_hub_id = name in ("path", "teacher") and not Path(path).exists()
        if path and not is_hub_id and "://" not in path:
            file = file.with_values(section, **{name: str(Path(path).expanduser().absolute())})
    if file.env is not None:
        mix = [e.model_copy(update={"args": _resolve_args(e.args)}) for e in file.env.mix]
        file = file.with_values("env", args=_resolve_args(file.env.args), mix=tuple(mix))
    return file


def _resolve_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return an environment's arguments, where `path` and `..._path` that exist are absolute."""
    paths = {
        name: str(Path(value).expanduser().absolute())
        for name, value in args.items()
        if name.endswith("path") and isinstance(value, str) and Path(value).expanduser().exists()
    }
    return {**args, **paths}


def iter_settings(kind: type[ConfigSection]) -> Iterator[tuple[str, str, Any]]:
    """Yield each setting as (section, name, field)."""
    for section, outer in kind.model_fields.items():
        for name, field in get_section_class(outer.annotation).model_fields.items():
            yield section, name, field


def check_resume(old: AnyRun, new: AnyRun) -> None:
    """Raise if a setting changed that a resume may not change."""
    for section, name, field in iter_settings(type(old)):
        before = getattr(getattr(old, section), name, None)
        after = getattr(getattr(new, section), name, None)
        if before == after:
            continue
        reason, schedule = "", old.trainer.lr_schedule
        if (section, name) == ("run", "steps") and schedule != "constant":
            reason = (
                ", and the learning rate of every step depends on it "
                f"([trainer] lr_schedule = {schedule!r})"
            )
        if reason or not (field.json_schema_extra or {}).get("mutable"):
            raise ResumeRefused(
                f"[{section}] {name} was {before!r} and is now {after!r}{reason}",
                "resume with the old value, or start a new run",
            )
