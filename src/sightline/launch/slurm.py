"""A run as a Slurm job: the batch script runs launcher and orchestrator, steps run the rest.

    sightline rl --on slurm --submits--> job --starts--> steps: server, trainer, worker-0..
      SIGUSR1 (preemption, time limit) --> checkpoint, requeue --> the same run resumes

A step ends when its standard input closes, which the launcher holds open.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.launch.process_spec import Resources

SIGNAL = "B:USR1@60"
"""The batch script gets SIGUSR1 60 seconds before its end."""
JOB_VARIABLE = "SLURM_JOB_ID"
MIB_PER_GB = 1e9 / 2**20
"""Slurm counts memory in units of 2**20 bytes, a run file in 10**9."""
TEST_TIMEOUT_S = 60.0
BAD_OPTIONS = 255
"""Exit status of sbatch for unknown options and values."""
NO_ROOM = "check `sinfo`, and the options in [launch.slurm] and [launch.resources] with --dry-run"


def build_step(name: str, resources: Resources, components: Sequence[Resources]) -> list[str]:
    """Return the command prefix that runs a command as a step of the job."""
    words = ["srun", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--exact", "--unbuffered"]
    words.append(f"--cpus-per-task={resources.cpus}")
    # Without a value, a step would take all memory of the job, and the next one would wait.
    memory = max(1, int(resources.memory_gb * MIB_PER_GB))
    words.append(f"--mem={memory}M" if resources.memory_gb else "--mem=0")
    if resources.gpus:
        words.append(f"--gpus={ceil(resources.gpus)}")
    elif components[0].gpus:  # otherwise the step would get all of them
        words.append("--gres=none")
    return [*words, f"--het-group={components.index(resources)}"] if len(components) > 1 else words


def build_script(
    file: RunFile, components: Mapping[Resources, int], command: Sequence[str], seeds: str
) -> str:
    """Return the batch script. `components` maps resources to the number of processes that request
    them, and `command` starts the launcher. `seeds`, such as 0-3, make the job an array."""
    number = "%A_%a" if seeds else "%j"
    log = Path(file.run.dir).absolute() / f"slurm-{number}.log"
    options: dict[str, object] = {
        "job-name": file.run.name.replace("/", "-"),
        "output": str(log),
        "open-mode": "append",
        "no-requeue" if file.launch.slurm.get("requeue") is False else "requeue": True,
        "signal": SIGNAL,
        **({"array": seeds} if seeds else {}),
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
    words = shlex.join(command)
    if seeds:
        seed = "$SLURM_ARRAY_TASK_ID"
        words += f" run.seed={seed} {shlex.quote(f'run.name={file.run.name}-seed')}{seed}"
    # exec: the launcher replaces the shell, and gets its signals.
    lines += ["", f'exec {words} --job "$SLURM_JOB_ID"']
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
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={value}"


def check_seeds(seeds: str) -> None:
    if seeds and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*(%\d+)?", seeds):
        raise ConfigError(f"--seeds {seeds} is not a list of numbers", "write 0-3, or 0,2,5")


def expand_seeds(seeds: str) -> list[int]:
    """Return the seeds as numbers. Slurm has no arrays of jobs with several components."""
    numbers, percent, _ = seeds.partition("%")
    if percent:
        raise ConfigError(
            f"--seeds {seeds}: % limits only job arrays, and a run whose processes request "
            "different resources is a separate job",
            "remove the %, or set nodes = 1 in [launch.slurm]",
        )
    ends = [[int(end) for end in part.split("-")] for part in numbers.split(",")]
    return [seed for part in ends for seed in range(part[0], part[-1] + 1)]


def check_script(text: str) -> str:
    """Return what `sbatch --test-only` says about the script; raise for unknown options."""
    if shutil.which("sbatch") is None:
        return "[launch.slurm] is not checked: this machine has no sbatch"
    try:
        process = subprocess.run(
            ["sbatch", "--test-only"],
            input=text, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not checked: sbatch --test-only took more than {TEST_TIMEOUT_S:.0f} s"
    lines = process.stderr.strip().splitlines() or ["nothing"]
    if process.returncode == BAD_OPTIONS:
        raise ConfigError(f"[launch.slurm] or [launch.resources]: {lines[0]}", NO_ROOM)
    return f"sbatch --test-only says: {lines[-1]}"


def submit(script: Path) -> str:
    """Submit the script, and return the job's id."""
    try:
        process = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        script.unlink()
        raise ConfigError(
            '[launch] on = "slurm", but this machine has no sbatch',
            "submit from a login node of the cluster; --dry-run prints the batch script",
        ) from error
    if process.returncode:
        script.unlink()
        raise ConfigError(f"sbatch refused the job: {process.stderr.strip()}", NO_ROOM)
    return process.stdout.strip().partition(";")[0]


def requeue() -> None:
    """Requeue this job."""
    job = os.environ.get(JOB_VARIABLE, "")
    command = ["scontrol", "requeue", job]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise ConfigError(
            f"cannot requeue job {job}: {process.stderr.strip()}",
            "submit it again with `sightline rl --resume RUN --on slurm`",
        )
