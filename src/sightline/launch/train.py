"""Start a run from Python: `train` takes a run file, a dict or settings, and returns the run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from sightline.config import RunFile, SftFile, validate_config
from sightline.config.load import read_run_file
from sightline.errors import ConfigError
from sightline.launch.rl import RlJob
from sightline.launch.sft import SftJob
from sightline.launch.training_run import start_run
from sightline.view.notebook import Run, open_run


def train(file: str | Path | dict[str, Any] | RunFile | SftFile, **overrides: Any) -> Run:
    """Train to the end and return the run: like `sightline sft` if the file has [sft], else like
    `sightline rl`.

    Overrides are sections, `run={"steps": 5}`, or settings, `**{"run.steps": 5}`. `env` may be an
    environment class that a module defines. A notebook shows the curves while the run trains.
    """
    if isinstance(file, dict):
        values, where = copy.deepcopy(file), "train"
    elif isinstance(file, RunFile | SftFile):
        values, where = file.model_dump(exclude_none=True), "train"
    else:
        values, where = read_run_file(Path(file)), str(file)
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if key or (section == "env" and isinstance(value, type)):
            value = {key or "name": value}
        if not isinstance(value, dict):
            raise ConfigError(
                f"{name} = {value!r}", f'write {name}={{"key": ...}}, or **{{"{name}.key": ...}}'
            )
        values.setdefault(section, {}).update(value)
    env = values.get("env") or {}
    if isinstance(kind := env.get("name"), type):
        values["env"] = {**env, "name": f"{kind.__module__}:{kind.__qualname__}"}
    if "sft" in values:
        run_dir = start_run(SftJob(), validate_config(SftFile, values, where))
    else:
        run_dir = start_run(RlJob(), validate_config(RunFile, values, where))
    return open_run(run_dir.path)
