"""A run as a job of Slurm: launcher and orchestrator are its batch script, all others its steps.

    sightline rl --on slurm --writes, submits--> job --starts--> steps: server, trainer, worker-0..
      SIGUSR1 (preemption, time limit) --> checkpoint, requeue --> the same run goes on

A step ends with its standard input, which the launcher holds.
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
"""So many seconds before its end the job is told of it."""
JOB_VARIABLE = "SLURM_JOB_ID"
MIB_PER_GB = 1e9 / 2**20
"""Slurm's M are of 2**20 bytes, the GB of a run file of 10**9."""
TEST_TIMEOUT_S = 60.0
BAD_OPTIONS = 255
"""What sbatch ends with where it does not know an option, or its value; 1 is the cluster's no."""
NO_ROOM = "check `sinfo`, and the options in [launch.slurm] and [launch.resources], by --dry-run"


def build_step(name: str, asked: Resources, components: Sequence[Resources]) -> list[str]:
    """The words that run a command as a step of the job."""
    words = ["srun", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--exact", "--unbuffered"]
    words.append(f"--cpus-per-task={asked.cpus}")
    # Without a figure a step would take all memory of the job, and the next one wait for it.
    words.append(
        f"--mem={max(1, int(asked.memory_gb * MIB_PER_GB))}M" if asked.memory_gb else "--mem=0"
    )
    if asked.gpus:
        words.append(f"--gpus={ceil(asked.gpus)}")
    elif components[0].gpus:  # which a step would have otherwise, all of them
        words.append("--gres=none")
    return [*words, f"--het-group={components.index(asked)}"] if len(components) > 1 else words


def build_script(
    file: RunFile, components: Mapping[Resources, int], command: Sequence[str], seeds: str
) -> str:
    """The file for sbatch. `components` are what processes ask for, and how many do, the batch
    script's first; `command` is that of the launcher; with `seeds`, such as 0-3, the job is an
    array of runs."""
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
    given = {name.replace("_", "-"): value for name, value in file.launch.slurm.items()}
    lines = ["#!/bin/bash"]
    for asked, count in components.items():
        options |= _measure_component(asked, count) | given
        lines += [_write_option(*one) for one in options.items() if one[1] is not False]
        lines += [f"#SBATCH {asked.component}"] if asked.component else []
        lines, options = [*lines, "#SBATCH hetjob"], {}
    lines.pop()
    words = shlex.join(command)
    if seeds:
        seed = "$SLURM_ARRAY_TASK_ID"
        words += f" run.seed={seed} {shlex.quote(f'run.name={file.run.name}-seed')}{seed}"
    # In the place of the shell, which is told of signals.
    lines += ["", f'exec {words} --job "$SLURM_JOB_ID"']
    return "\n".join(lines) + "\n"


def _measure_component(asked: Resources, count: int) -> dict[str, object]:
    """What `count` tasks of this size are asked for with."""
    found: dict[str, object] = {"ntasks": count, "cpus-per-task": asked.cpus}
    if asked.gpus and count > 1:
        found["gpus-per-task"] = ceil(asked.gpus)
    elif asked.gpus:  # of the one node; steps of other sizes do not inherit this option
        found["gres"] = f"gpu:{ceil(asked.gpus)}"
    if asked.memory_gb:
        found["mem-per-cpu"] = f"{ceil(asked.memory_gb * MIB_PER_GB / asked.cpus)}M"
    return found


def _write_option(name: str, value: object) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={value}"


def check_seeds(seeds: str) -> None:
    if seeds and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*(%\d+)?", seeds):
        raise ConfigError(f"--seeds {seeds} is no list of numbers", "write 0-3, or 0,2,5")


def expand_seeds(seeds: str) -> list[int]:
    """The numbers, for jobs of several components, of which Slurm takes no array."""
    numbers, percent, _ = seeds.partition("%")
    if percent:
        raise ConfigError(
            f"--seeds {seeds}: each run is a job of its own, for its processes ask for unlike "
            "resources, and no number limits how many run at a time",
            "leave the % out, or set nodes = 1 in [launch.slurm]",
        )
    ends = [[int(end) for end in part.split("-")] for part in numbers.split(",")]
    return [seed for part in ends for seed in range(part[0], part[-1] + 1)]


def check_script(text: str) -> str:
    """What sbatch says of the file, which it does not submit; refuses options that it does not
    know."""
    if shutil.which("sbatch") is None:
        return "not checked: this machine has no sbatch, and the options of [launch.slurm] are its"
    try:
        done = subprocess.run(
            ["sbatch", "--test-only"],
            input=text, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not checked: sbatch --test-only took more than {TEST_TIMEOUT_S:.0f} s"
    said = done.stderr.strip().splitlines() or ["nothing"]
    if done.returncode == BAD_OPTIONS:
        raise ConfigError(f"[launch.slurm] or [launch.resources]: {said[0]}", NO_ROOM)
    return f"sbatch --test-only says: {said[-1]}"


def submit(script: Path) -> str:
    """Gives the file to sbatch; returns the id of the job."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        script.unlink()
        raise ConfigError(
            '[launch] on = "slurm", and this machine has no sbatch',
            "submit from a login node of the cluster; --dry-run prints the file for it",
        ) from error
    if done.returncode:
        script.unlink()
        raise ConfigError(f"sbatch refuses the job: {done.stderr.strip()}", NO_ROOM)
    return done.stdout.strip().partition(";")[0]


def requeue() -> None:
    """Has Slurm start this job again, when it can."""
    job = os.environ.get(JOB_VARIABLE, "")
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"job {job} cannot be requeued: {done.stderr.strip()}",
            "submit it again with `sightline rl --resume RUN`, from a job of your own",
        )
