"""Submit a run to a cluster from outside, and run it inside the cluster's job.

outside   plan --> a batch script, manifests, or the output of `--dry-run`
inside    the launcher, which the cluster's job starts and restarts with the same run
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from sightline.config import RunFile, load_config
from sightline.errors import ConfigError, format_command
from sightline.launch import slurm
from sightline.launch.checks.settings import check_compatible_settings
from sightline.launch.claim import write_private
from sightline.launch.jobs import RlJob
from sightline.launch.manifests import build_kubernetes, build_secrets, make_name
from sightline.launch.processes import num_cores
from sightline.launch.run_plan import (
    Endpoints,
    count_components,
    describe_plan,
    find_address,
    plan_run,
)
from sightline.launch.supervision import resolve_workers
from sightline.launch.training_run import resume_run, start_run
from sightline.regular_file import read_text
from sightline.run import RunDir
from sightline.view.run_status import STOPPED, get_status

SECRETS = "secrets.env"


class Preempted(Exception):
    """Raised if the job is preempted before its run has started."""


def submit_run(
    path: Path, overrides: Sequence[str], resume: Path | None, *, dry_run: bool, output: Path | None
) -> None:
    """Write the cluster's files for the run file `path` or the run `resume`. Submit a Slurm job,
    unless `dry_run` or `output` asks only for the files."""
    file = load_config(RunFile, path, overrides)
    on = file.launch.on
    if output is not None and on in ("local", "ray"):
        raise ConfigError(f"-o {output} requires --on slurm or kubernetes", "remove -o")
    file, _ = resolve_workers(file, num_cores())
    check_compatible_settings(file)
    folder = Path(file.run.dir).absolute()
    hub = f"tcp://{find_address(file)}:{file.launch.port or 'PORT'}"
    at = Endpoints(hub, file.inference.servers)
    run_folder = resume.absolute() if resume else folder / f"{file.run.name}-001"
    specs = plan_run(file, run_folder, "RUN-ID", at)
    files = _build_files(file, path, overrides, resume)
    if dry_run or output is not None or on != "slurm":
        for name, text in files.items():
            if output is None:
                print(f"# {name}\n{text}")
            else:
                output.mkdir(parents=True, exist_ok=True)
                (output / name).write_text(text)
                print(f"wrote {output / name}")
        if on != "kubernetes":
            print(describe_plan(file, specs))
        elif output is not None:
            _write_secrets(file, output)
        else:
            print(f"# -o DIR writes these files and {SECRETS}")
        return
    [(name, script)] = files.items()
    folder.mkdir(parents=True, exist_ok=True)
    job = slurm.submit(script)
    (folder / name).write_text(script)
    print(f"job: {job} ({folder / name})")
    log = format_command("tail", "-F", folder / f"slurm-{job}.log")
    print(f"follow: {log}; {format_command('squeue', '-j', job)}")
    print(f"stop: {format_command('scancel', '--signal=TERM', '--batch', job)}")


def _build_files(
    file: RunFile, path: Path, overrides: Sequence[str], resume: Path | None
) -> dict[str, str]:
    """Return the cluster's files by name."""
    if file.launch.on == "slurm":
        what = [str(path.absolute())] if resume is None else ["--resume", str(resume.absolute())]
        command = [file.launch.python, "-m", "sightline", "rl", "--plain", *what, *overrides]
        command += [f"rollout.workers={file.rollout.workers}"]
        script = slurm.build_script(file, count_components(file), command)
        return {f"{file.run.name}.sbatch": script}
    if file.launch.on != "kubernetes":
        return {}
    if resume is not None:
        raise ConfigError(
            "--resume does not work with --on kubernetes",
            "apply the same manifests again: the launcher resumes the run by itself",
        )
    return {"sightline.yaml": build_kubernetes(file, read_text(path), overrides)}


def _write_secrets(file: RunFile, output: Path) -> None:
    """Write the secrets that the manifests refer to, and print how to start the run."""
    write_private(output / SECRETS, build_secrets(file))
    print(f"wrote {output / SECRETS}: delete it once the cluster has it")
    space = file.launch.kubernetes and file.launch.kubernetes.namespace
    create = ["kubectl", "create", "secret", "generic", f"{make_name(file.run.name)}-secret"]
    create += [f"--from-env-file={output / SECRETS}", *(["-n", space] if space else [])]
    apply = format_command("kubectl", "apply", "-f", output / "sightline.yaml")
    print(f"start: {format_command(*create)} && {apply}")


def run_job(
    job: RlJob, path: Path, overrides: Sequence[str], key: str, resume: Path | None
) -> None:
    """Run as the cluster's job `key`. Start a run, resume the run that this job started before, or
    resume `resume`. On preemption (SIGUSR1), stop the run cleanly and requeue the job."""
    file = load_config(RunFile, path, overrides)
    record = Path(file.run.dir).absolute() / ".jobs" / f"{file.launch.on}-{key}-{file.run.name}"
    was_preempted = False

    def preempt(number: int, frame: FrameType | None) -> None:
        nonlocal was_preempted
        was_preempted = True
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # no process has started yet
            raise Preempted
        os.kill(os.getpid(), signal.SIGTERM)

    def record_run(run_dir: RunDir) -> None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(str(run_dir.path))

    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        if resume:
            run_dir = resume_run(job, resume, overrides)
        elif record.exists() and Path(read_text(record)).is_dir():
            run_dir = resume_run(job, Path(read_text(record)), [], file)
        else:
            run_dir = start_run(job, file, record_run)
        was_preempted = was_preempted and get_status(run_dir).state == STOPPED
    except Preempted:
        pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    if was_preempted and file.launch.on == "slurm" and file.launch.slurm.get("requeue", True):
        print("requeueing the job, which will resume the run", flush=True)
        slurm.requeue()
