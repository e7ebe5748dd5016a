"""The run file: every setting, checked at load.

A value has one home. Sections are read by the part that they are named after. Unknown keys are
refused with the nearest known one. A field marked `free` may change when a run is resumed; any
other would break exactness, and is refused by name.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sightline.errors import ConfigError, ResumeRefused

FREE: dict[str, Any] = {"free": True}
MIX = "mix"
"""The name of `[env]` where `[[env.mix]]` names several."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Section):
    name: str = Field("run", description="Name of the run; its directory is made from it.")
    dir: str = Field("runs", description="Folder that run directories are made in.")
    seed: int = Field(0, description="Seeds tasks, sampling and initial state.")
    steps: int = Field(
        100, ge=1, description="Optimizer steps to train for.", json_schema_extra=FREE
    )


class Model(Section):
    path: str = Field(..., description="Folder of the checkpoint to start from.")
    min_pixels: int | None = Field(None, description="Overrides the checkpoint's lower bound.")
    max_pixels: int | None = Field(None, description="Overrides the checkpoint's upper bound.")
    number_pictures: bool = Field(
        False, description="Whether the prompt numbers its images, where the chat format can."
    )
    train_vision: bool = Field(True, description="Whether the vision tower trains.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of weights and arithmetic, on both sides."
    )

    def overrides(self) -> dict[str, int]:
        found = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: value for name, value in found.items() if value is not None}


class Media(Section):
    root: str = Field("", description="The store; empty means `media` in the run directory.")
    max_gb: float = Field(
        50.0, gt=0, description="The run ends, clearly, when its store grows past this.",
        json_schema_extra=FREE,
    )  # fmt: skip
    file_roots: tuple[str, ...] = Field(
        (), description="Folders that file:// images may come from; none by default."
    )
    http_hosts: tuple[str, ...] = Field(
        (), description="Hosts that http(s) images may come from; none by default."
    )
    max_bad_fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of a batch's samples that bad media may cost.",
        json_schema_extra=FREE,
    )


class EnvShare(Section):
    """One environment of a mix, written as `[[env.mix]]`."""

    name: str = Field(..., min_length=1)
    args: dict[str, Any] = {}
    weight: float = Field(1.0, gt=0)
    label: str = ""


class Env(Section):
    name: str = Field(..., description="A built-in environment, or 'module:Class'.")
    args: dict[str, Any] = Field({}, description="Passed to the environment's constructor.")
    mix: tuple[EnvShare, ...] = Field(
        (), description="In place of `name`: several, each with name, args, weight and label."
    )

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_mix(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mix"):
            if values.get("name", MIX) != MIX or values.get("args"):
                raise ValueError("name and args stand in the [[env.mix]] tables when there are any")
            return {"name": MIX, **values}
        return values


class Rollout(Section):
    workers: int = Field(
        0, ge=0, description="Environment worker processes; 0 follows cores and rollouts.",
        json_schema_extra=FREE,
    )  # fmt: skip
    worker_max_gb: float = Field(
        0.0, ge=0, description="A worker with more memory is replaced; 0 is its share of half.",
        json_schema_extra=FREE,
    )  # fmt: skip
    hang_s: float = Field(
        300.0, gt=0, description="A worker whose event loop stands still this long is replaced.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_in_flight: int = Field(
        0, ge=0, description="Rollouts under way at the same time; 0 is what the lag allows.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_in_flight_mb: int = Field(
        0, ge=0, description="Memory of all rollouts under way, over all workers; 0 is any.",
        json_schema_extra=FREE,
    )  # fmt: skip
    temperature: float = Field(1.0, gt=0, description="Of sampling, and of the trained softmax.")
    max_tokens: int = Field(64, ge=1, description="Most tokens a turn may sample.")
    timeout_s: float = Field(
        600.0, gt=0, description="A rollout that takes longer is broken.", json_schema_extra=FREE
    )
    max_turns: int = Field(
        0, ge=0, description="A rollout that would take more is truncated; 0 is any number."
    )
    count_truncated: bool = Field(
        True, description="Whether the reward of a truncated rollout counts, or drops it."
    )


class Filters(Section):
    max_sampled_tokens: int = Field(
        0, ge=0, description="Drop rollouts that sampled more; 0 is off."
    )
    max_repeats: int = Field(
        0, ge=0, description="Drop rollouts with one token this often in a row; 0 is off."
    )
    min_logprob: float | None = Field(
        None, description="Drop rollouts with a token sampled at a logprob below this."
    )


class Orchestrator(Section):
    groups_per_step: int = Field(16, ge=1, description="Groups that train in one step.")
    group_size: int = Field(8, ge=2, description="Rollouts of one task.")
    max_lag: int = Field(1, ge=0, description="Oldest policy that may train, in versions; 0 waits.")
    advantage: Literal["grpo", "no_std"] = Field(
        "grpo", description="Group-relative, with or without division by the deviation."
    )
    credit: Literal["rollout", "turn"] = Field(
        "rollout", description="One advantage a rollout, or one a turn (Outcome.per_turn)."
    )
    probe_every: int = Field(
        0, ge=0, description="Every so many steps wait for a group of lag 0; 0 is never."
    )
    max_replaced: float = Field(
        1.0,
        ge=0,
        description="Groups without signal that a step may replace, as a share of its groups.",
    )
    max_empty_batches: int = Field(
        5,
        ge=1,
        description="So many batches' worth of groups without signal end the run.",
        json_schema_extra=FREE,
    )
    keep_batches: bool = Field(
        False, description="Keep batches that a checkpoint covers, for `sightline inspect`.",
        json_schema_extra=FREE,
    )  # fmt: skip


class Trainer(Section):
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    vision_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of the vision tower; unset, `lr`."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up, down to `lr_end` at the last step."
    )
    lr_end: float = Field(0.0, ge=0, description="Learning rate at the last step, as a fraction.")
    warmup_steps: int = Field(0, ge=0, description="Steps in which the learning rate rises.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Of AdamW.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Of AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW, on matrices.")
    grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    loss: Literal["ppo", "cispo", "gspo", "tis"] = Field(
        "ppo", description="The policy loss: clipped by token or by answer, or truncated weights."
    )
    loss_average: Literal["tokens", "samples", "constant"] = Field(
        "tokens", description="What the loss of a batch is divided by."
    )
    loss_constant: float = Field(
        1.0, gt=0, description='Divides the summed loss, with loss_average = "constant".'
    )
    importance_cap: float = Field(
        2.0, gt=0, description='Largest weight of a token, with loss = "tis".'
    )
    clip_low: float = Field(0.2, gt=0, description="The ratio is clipped below 1 minus this.")
    clip_high: float = Field(0.28, gt=0, description="The ratio is clipped above 1 plus this.")
    kl_weight: float = Field(
        0.0, ge=0, description="Weight of the KL to the starting checkpoint; 0 loads none."
    )
    micro_batch_tokens: int = Field(8192, ge=1, description="Most tokens of a micro-batch.")
    micro_batch_patches: int = Field(
        65536, ge=1, description="Most image patches of a micro-batch."
    )
    checkpoint_every: int = Field(
        25, ge=1, description="Steps between checkpoints.", json_schema_extra=FREE
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Newest checkpoints that are kept.", json_schema_extra=FREE
    )
    device: str = Field("auto", description="cpu, cuda or auto.")
    ranks: int = Field(
        1, ge=1, description="Processes that share the model and the work.", json_schema_extra=FREE
    )
    stuck_after_s: float = Field(
        900.0,
        ge=0,
        description="A trainer that stands still with work at hand so long ends; 0 is never.",
        json_schema_extra=FREE,
    )
    threads: int = Field(
        0, ge=0, description="Compute threads; 0 shares the cores with the server."
    )
    pixel_cache_mb: int = Field(
        256, ge=0, description="Patches kept between batches.", json_schema_extra=FREE
    )


class Inference(Section):
    engine: Literal["torch"] = Field("torch", description="Which engine serves.")
    host: str = Field("127.0.0.1", description="Address to bind.", json_schema_extra=FREE)
    port: int = Field(0, ge=0, le=65535, description="0 takes a free one.", json_schema_extra=FREE)
    device: str = Field("auto", description="cpu, cuda or auto.")
    threads: int = Field(
        0, ge=0, description="Compute threads; 0 shares the cores with the trainer.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_rows: int = Field(
        256, ge=1, description="Sequences in flight or kept for their next turn.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_len: int = Field(2048, ge=2, description="Longest sequence, prompt and answer.")
    prefill_chunk: int = Field(
        512, ge=1, description="Most prompt tokens of a sequence computed at once.",
        json_schema_extra=FREE,
    )  # fmt: skip
    pixel_cache_mb: int = Field(
        256, ge=0, description="Patches kept in memory.", json_schema_extra=FREE
    )
    feature_cache_mb: int = Field(
        256, ge=0, description="Vision features kept in memory.", json_schema_extra=FREE
    )


class Eval(Section):
    tasks: int = Field(
        256, ge=0, description="Held-out tasks played before the first and after the last step."
    )
    temperature: float = Field(1.0, ge=0, description="Of sampling in evaluation.")


class Sft(Section):
    output: str = Field(..., description="Folder that the trained checkpoint is written to.")
    batch_size: int = Field(64, ge=1, description="Conversations of one step.")


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


class SftFile(Section):
    """What `sightline sft` reads."""

    model: Model
    env: Env
    sft: Sft
    run: Run = Run()
    media: Media = Media()
    trainer: Trainer = Trainer()


AnyFile = TypeVar("AnyFile", bound=Section)


def load(kind: type[AnyFile], path: Path, overrides: Sequence[str] = ()) -> AnyFile:
    """The file at `path`, with `section.key=value` overrides."""
    try:
        values = tomllib.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"no run file at {path}", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "mend the line that it names") from None
    for override in overrides:
        _apply(values, override)
    return check(kind, values, str(path))


def check(kind: type[AnyFile], values: dict[str, Any], where: str) -> AnyFile:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explain(kind, error, where) from None


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or len(names) < 2:
        raise ConfigError(f"override {override!r}", "write it as section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    place = values
    for name in names[:-1]:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: {name} is a value", "name a section first")
    place[names[-1]] = value


def _explain(kind: type[Section], error: ValidationError, where: str) -> ConfigError:
    first = error.errors()[0]
    names = [str(part) for part in first["loc"]]
    key = _spell(names)
    if first["type"] == "extra_forbidden":
        known = _known_names(kind, names[:-1])
        near = difflib.get_close_matches(names[-1], known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return ConfigError(f"{where}: unknown key {key}", fix)
    if first["type"] == "missing":
        return ConfigError(f"{where}: {key} is missing", f"add {key}")
    return ConfigError(
        f"{where}: {key} = {first['input']!r}: {first['msg']}", "give a value that fits"
    )


def _spell(names: list[str]) -> str:
    return f"[{names[0]}]" if len(names) == 1 else f"[{'.'.join(names[:-1])}] {names[-1]}"


def _known_names(kind: type[BaseModel], names: list[str]) -> list[str]:
    for name in names:
        inner = kind.model_fields[name].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)


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


def dump(file: Section) -> str:
    """The file as TOML, every setting spelled out."""
    lines: list[str] = []
    for section, values in file.model_dump().items():
        lines.append(f"[{section}]")
        nested = {k: v for k, v in values.items() if isinstance(v, dict)}
        for name, value in values.items():
            if value is not None and name not in nested:
                lines.append(f"{name} = {_toml(value)}")
        for name, inner in nested.items():
            if inner:
                lines.append(f"\n[{section}.{name}]")
                lines += [f"{_key(key)} = {_toml(value)}" for key, value in inner.items()]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes as TOML does, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)
