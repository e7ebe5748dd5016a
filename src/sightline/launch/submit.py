"""A run on a cluster: what is written and submitted from outside, and what goes on inside.

outside   plan --> a file for sbatch, manifests, or nothing but the words of `--dry-run`
inside    the launcher, which a job of the cluster starts, and starts again: the same run
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import yaml

from sightline.config import RunFile, load_config
from sightline.errors import ConfigError
from sightline.launch import slurm
from sightline.launch.checks.settings import check_hosts
from sightline.launch.claim import write_private
from sightline.launch.manifests import build_kubernetes, build_secrets, make_name
from sightline.launch.processes import num_cores
from sightline.launch.rl import RlJob
from sightline.launch.run_plan import (
    Endpoints,
    count_components,
    describe_address,
    describe_plan,
    describe_total,
    plan_run,
)
from sightline.launch.training_run import resume_run, start_run
from sightline.launch.worker_supervisor import resolve_workers
from sightline.run import RunDir
from sightline.view.run_status import STOPPED, get_status

RUN_ID = "RUN-ID"
"""Stands for the id of a run that has not begun."""


SECRETS = "secrets.env"


class Preempted(Exception):
    """The job is to end before its run has begun."""


@dataclass(frozen=True)
class Request:
    """What `sightline rl` was asked to run on a cluster."""

    path: Path
    """The run file, or the settings of the run to go on with."""
    overrides: Sequence[str]
    resume: Path | None = None
    """The run to go on with."""
    seeds: str = ""

    @property
    def words(self) -> list[str]:
        """The words of the launcher inside, behind `sightline rl`."""
        what = (
            [str(self.path)] if self.resume is None else ["--resume", str(self.resume.absolute())]
        )
        return ["-m", "sightline", "rl", "--plain", *what, *self.overrides]


def submit_run(request: Request, dry_run: bool, output: Path | None) -> None:
    """Writes what the cluster is to start, and submits it where that is a job of Slurm."""
    file, seeds = load_config(RunFile, request.path, list(request.overrides)), request.seeds
    slurm.check_seeds(seeds)
    on = file.launch.on
    _check_output(on, output)
    if seeds and on != "slurm":
        raise ConfigError("--seeds is for --on slurm", "elsewhere write run.seed=0,1,2,3")
    file, _ = resolve_workers(file, num_cores())
    check_hosts(file)
    if seeds and len(count_components(file)) > 1:
        for seed in slurm.expand_seeds(seeds):
            own = (f"run.seed={seed}", f"run.name={file.run.name}-seed{seed}")
            one = replace(request, overrides=(*request.overrides, *own), seeds="")
            submit_run(one, dry_run, output)
        return
    folder = Path(file.run.dir).absolute()
    at = Endpoints(describe_address(file), file.inference.servers)
    specs = plan_run(file, folder / f"{file.run.name}-001", RUN_ID, at)
    files = _build_files(file, request)
    if dry_run or output is not None or on != "slurm":
        opinion = slurm.check_script(*files.values()) if on == "slurm" else ""
        _show(files, output)
        if not file.launch.cluster_starts_processes:
            print(describe_plan(file, specs))
        if on != "local":
            # A comment, for what stands before it may be read as YAML.
            print(f"# {describe_total(file)}")
        if on == "slurm":
            print(f"# {opinion}")
        elif file.launch.cluster_starts_processes and output is not None:
            _write_secrets(file, output)
        elif file.launch.cluster_starts_processes:
            print(f"# -o DIR writes it there, and {SECRETS} with the secrets that it names")
        return
    folder.mkdir(parents=True, exist_ok=True)
    (script := folder / f"{file.run.name}.sbatch").write_text(files[script.name])
    job = slurm.submit(script)
    print(f"job: {job} ({script})")
    print(f"follow: tail -F {folder}/slurm-{job}{'_*' * bool(seeds)}.log; squeue -j {job}")
    print(f"stop: scancel --signal=TERM --batch {job}")


def _check_output(on: str, output: Path | None) -> None:
    if output is not None and on in ("local", "ray"):
        raise ConfigError(
            f'-o {output} with [launch] on = "{on}", which is given no files',
            "leave it out, or name a cluster: --on slurm or kubernetes",
        )


def _build_files(file: RunFile, request: Request) -> dict[str, str]:
    """What is given to the cluster, by the names of the files."""
    if file.launch.on == "slurm":
        words = replace(request, path=request.path.absolute()).words
        words += [f"rollout.workers={file.rollout.workers}"]
        command = [file.launch.python, *words]
        script = slurm.build_script(file, count_components(file), command, request.seeds)
        return {f"{file.run.name}.sbatch": script}
    if file.launch.on != "kubernetes":
        return {}
    if request.resume is not None:
        raise ConfigError(
            "--resume does not work with --on kubernetes",
            "apply the same manifests again: the launcher resumes the run by itself",
        )
    manifests = build_kubernetes(file, request.path.read_text(), request.overrides)
    return {"sightline.yaml": yaml.safe_dump_all(manifests, sort_keys=False)}


def _write_secrets(file: RunFile, output: Path) -> None:
    """Writes the secrets that the files name, and prints how a run is started with them."""
    write_private(output / SECRETS, build_secrets(file))
    print(f"wrote {output / SECRETS}: remove it when the cluster has it")
    space = file.launch.kubernetes.get("namespace")
    name, space = make_name(file.run.name), f" -n {space}" if space else ""
    print(
        f"start: kubectl create secret generic {name}-secret --from-env-file={output}/{SECRETS}"
        f"{space} && kubectl apply -f {output}/sightline.yaml"
    )


def _show(files: dict[str, str], output: Path | None) -> None:
    for name, text in files.items():
        if output is None:
            print(f"# {name}\n{text}")
        else:
            output.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text)
            print(f"wrote {output / name}")


def run_job(
    job: RlJob, path: Path, overrides: Sequence[str], key: str, resume: Path | None
) -> None:
    """Runs as a job of the cluster, called `key`: from the first step, or on with the run of this
    name that it began when it was started before, or `resume`. Where the cluster takes the machine
    back (SIGUSR1), the run is stopped in order and the job is queued again."""
    file = load_config(RunFile, path, overrides)
    began = Path(file.run.dir).absolute() / ".jobs" / f"{file.launch.on}-{key}-{file.run.name}"
    was_preempted = False

    def preempt(number: int, frame: FrameType | None) -> None:
        nonlocal was_preempted
        was_preempted = True
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # nothing has started yet
            raise Preempted
        os.kill(os.getpid(), signal.SIGTERM)

    def note(run_dir: RunDir) -> None:
        began.parent.mkdir(parents=True, exist_ok=True)
        began.write_text(str(run_dir.path))

    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        if resume:
            run_dir = resume_run(job, resume, overrides)
        elif began.exists() and Path(began.read_text()).is_dir():  # and was not refused since
            run_dir = resume_run(job, Path(began.read_text()), [], file)
        else:
            run_dir = start_run(job, file, note)
        was_preempted = was_preempted and get_status(run_dir).state == STOPPED
    except Preempted:
        pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    if was_preempted and file.launch.on == "slurm" and file.launch.slurm.get("requeue", True):
        print("the job is queued again, and goes on with the run", flush=True)
        slurm.requeue()
