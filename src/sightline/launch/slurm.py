"""A run as a Slurm job. The batch script runs launcher and orchestrator, and steps the rest.

    sightline rl --on slurm --submits--> job --starts--> steps: server, trainer, worker-0..
      SIGUSR1 (preemption, time limit) --> checkpoint, requeue --> the same run resumes

The launcher holds each step's standard input open. A step ends when its input closes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.launch.process_spec import Resources

SIGNAL = "B:USR1@60"
"""Signal option: the batch script gets SIGUSR1 60 seconds before its time limit."""
MIB_PER_GB = 1e9 / 2**20
"""Slurm counts memory in units of 2**20 bytes, a run file in 10**9."""


def build_step(name: str, resources: Resources, components: Sequence[Resources]) -> list[str]:
    """Return the command prefix that runs a command as a step of the job."""
    srun = ["srun", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--exact", "--unbuffered"]
    srun.append(f"--cpus-per-task={resources.cpus}")
    # Without a value, a step would take all the job's memory, and the next one would wait.
    memory = max(1, int(resources.memory_gb * MIB_PER_GB))
    srun.append(f"--mem={memory}M" if resources.memory_gb else "--mem=0")
    if resources.gpus:
        srun.append(f"--gpus={ceil(resources.gpus)}")
    elif components[0].gpus:  # otherwise the step would get all GPUs
        srun.append("--gres=none")
    return [*srun, f"--het-group={components.index(resources)}"] if len(components) > 1 else srun


def build_script(file: RunFile, components: Mapping[Resources, int], command: Sequence[str]) -> str:
    """Return the batch script. `components` maps resources to the number of processes that request
    them, and `command` starts the launcher."""
    options: dict[str, object] = {
        "job-name": file.run.name,
        "output": str(Path(file.run.dir).absolute() / "slurm-%j.log"),
        "open-mode": "append",
        "no-requeue" if file.launch.slurm.get("requeue") is False else "requeue": True,
        "signal": SIGNAL,
    }
    settings = {name.replace("_", "-"): value for name, value in file.launch.slurm.items()}
    lines = ["#!/bin/bash"]
    for resources, count in components.items():
        options |= _build_options(resources, count) | settings
        lines += [
            _write_option(name, value) for name, value in options.items() if value is not False
        ]
        lines += [f"#SBATCH {resources.component}"] if resources.component else []
        lines, options = [*lines, "#SBATCH hetjob"], {}
    lines.pop()
    # With exec, the launcher replaces the shell and gets its signals.
    lines += ["", f'exec {shlex.join(command)} --job "$SLURM_JOB_ID"']
    return "\n".join(lines) + "\n"


def _build_options(resources: Resources, count: int) -> dict[str, object]:
    """Return the sbatch options for `count` tasks with these resources."""
    options: dict[str, object] = {"ntasks": count, "cpus-per-task": resources.cpus}
    if resources.gpus and count > 1:
        options["gpus-per-task"] = ceil(resources.gpus)
    elif resources.gpus:  # steps of other sizes do not inherit this option
        options["gres"] = f"gpu:{ceil(resources.gpus)}"
    if resources.memory_gb:
        memory = ceil(resources.memory_gb * MIB_PER_GB / resources.cpus)
        options["mem-per-cpu"] = f"{memory}M"
    return options


def _write_option(name: str, value: object) -> str:
    text = str(value)
    if not f"{name}{text}".isprintable():
        raise ConfigError(
            f"the sbatch option {name} = {text!r} has a line break",
            "remove it from [launch.slurm] or [launch.resources]",
        )
    # sbatch splits a line like a shell does.
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(text)}"


def submit(script: str) -> str:
    """Submit the script, and return the job's id."""
    output = _call(
        ["sbatch", "--parsable"],
        script,
        "sbatch refused the job",
        "submit from a login node. Check `sinfo`, and the options in [launch.slurm] and "
        "[launch.resources] with --dry-run",
    )
    return output.strip().partition(";")[0]


def requeue() -> None:
    job = os.environ.get("SLURM_JOB_ID", "")
    fix = "submit it again with `sightline rl --resume RUN --on slurm`"
    _call(["scontrol", "requeue", job], "", f"cannot requeue job {job}", fix)


def _call(command: list[str], text: str, problem: str, fix: str) -> str:
    """Return the output of a Slurm command, which gets `text` as its input."""
    try:
        return subprocess.check_output(command, input=text, stderr=subprocess.PIPE, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise ConfigError(f"{problem}: {reason.strip()}", fix) from error
