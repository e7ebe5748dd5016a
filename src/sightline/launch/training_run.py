"""Start, watch and resume a training run, for `sightline rl` and `sightline sft`.

    resolve --> check --> claim and lock the directory --> record --> processes
      waits for: the end of the leading process     unblocked by: the last step, a signal, a failure

A `TrainingJob` holds the differences between the two commands.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic

from sightline.config import (
    AnyRun,
    LoggingConfig,
    RunFile,
    check_resume,
    dump_checked_toml,
    load_config,
    resolve_paths,
)
from sightline.errors import ConfigError, ProcessFailed, ResumeRefused, SightlineError
from sightline.launch.checks.model import describe_family, resolve_model
from sightline.launch.checks.table import SETTINGS, STORE, Facts, Report, run_checks
from sightline.launch.claim import (
    check_model_unchanged,
    claim_run_dir,
    lock_run_dir,
    make_secret,
    record_model_digests,
)
from sightline.launch.process_spec import ProcessSpec, build_local_spec
from sightline.launch.process_watch import StoppedProcessWatch, bound_logs, kill_marked
from sightline.launch.processes import (
    Processes,
    TrainerWatchdog,
    call_view,
    collect_signals,
    num_cores,
    watch_processes,
)
from sightline.launch.supervision import TrainerSupervisor
from sightline.launch.torchrun import (
    TorchrunContext,
    build_local_specs,
    build_rank_spec,
    find_context,
    read_rendezvous,
)
from sightline.orchestrator.run_state import read_progress
from sightline.run import EventLog, RunDir
from sightline.view.console import LiveView
from sightline.view.run_status import SIGNAL, describe_end, get_status
from sightline.view.sinks import feed_in_background
from sightline.wire.file import disk_errors, write_atomic


class TrainingJob(ABC, Generic[AnyRun]):
    """A training command: the steps in which `sightline rl` and `sightline sft` differ."""

    file_kind: type[AnyRun]
    command: str
    leader: str
    """Name of the process whose end ends the run."""
    trainer: str
    """Name of the trainer's rank 0."""
    plain: bool
    """Whether to print plain lines instead of the live view."""
    _printed_description = ""
    """The model's properties that were printed. The runs of a sweep do not repeat them."""

    def resolve(self, file: AnyRun) -> AnyRun:
        """Return the run file with the settings that depend on this machine."""
        return file

    def check(self, file: AnyRun, run_dir: RunDir, report: Report = lambda *finding: None) -> None:
        """Run the checks that need the model, and print its properties."""
        facts = Facts(run_dir, file)
        with contextlib.chdir("."):  # building an environment may change the working directory
            run_checks(facts, self.command, report)
        engine = file.inference.engine if isinstance(file, RunFile) else ""
        description = describe_family(file.model, facts.family, engine)
        if description != self._printed_description:
            print(description)
        self._printed_description = description

    @abstractmethod
    def count_trainer_threads(self, file: AnyRun) -> int:
        """Return the number of compute threads of all ranks on this machine."""

    @abstractmethod
    def build_specs(self, file: AnyRun, run_dir: RunDir) -> list[ProcessSpec]:
        """Return the run's processes in starting order, with one trainer for all its ranks."""

    def build_supervisor(
        self, file: AnyRun, processes: Processes, specs: list[ProcessSpec], events: EventLog
    ) -> Callable[[], None]:
        """Return a function that restarts processes. It is called repeatedly."""
        return lambda: None

    def reserve(
        self, file: AnyRun, run_dir: RunDir, specs: list[ProcessSpec]
    ) -> AbstractContextManager[None]:
        """Reserve resources for the processes on a cluster."""
        return contextlib.nullcontext()

    def release(self, file: AnyRun, run_dir: RunDir) -> None:
        """Release resources that would outlive the run's processes."""

    @abstractmethod
    def print_outcome(self, file: AnyRun, run_dir: RunDir, stopped_by: str) -> None:
        """Print the location of the results. `stopped_by` is empty for a finished run."""


def start_run(
    job: TrainingJob[AnyRun],
    file: AnyRun,
    on_recorded: Callable[[RunDir], object] = lambda run_dir: None,
) -> RunDir:
    """Run `file` in a new directory. `on_recorded` gets it once the run can be resumed."""
    context = find_context()
    run_checks(Facts(RunDir(Path(file.run.dir)), file), SETTINGS)
    file = resolve_model(file)
    file = resolve_paths(job.resolve(file if context is None else context.apply_to(file)))
    run_dir = RunDir(Path(file.run.dir).absolute())
    job.check(file, run_dir)
    run_dir = claim_run_dir(str(run_dir.path), file.run.name)
    try:
        with disk_errors(run_dir.path), lock_run_dir(run_dir):
            return _run(job, file, run_dir, record_model_digests, context, on_recorded)
    except (SightlineError, KeyboardInterrupt, SystemExit):
        if not any(run_dir.logs.glob("*.log")):  # no process was started
            shutil.rmtree(run_dir.path, ignore_errors=True)
        raise


def resume_run(
    job: TrainingJob[AnyRun], path: Path, overrides: Sequence[str], file: AnyRun | None = None
) -> RunDir:
    """Resume a run from its last checkpoint, with the settings of `file` if given."""
    run_dir = RunDir(path.absolute())
    if not run_dir.config.is_file():
        raise ResumeRefused(f"{path} is not a run directory", "pass the folder with config.toml")
    context, status = find_context(), get_status(run_dir)
    if status.command != job.command:
        raise ResumeRefused(
            f"{path} is a run of `sightline {status.command}`", f"use `{status.resume_command}`"
        )
    old = resolve_paths(load_config(job.file_kind, run_dir.config))
    new = resolve_paths(load_config(job.file_kind, run_dir.config, overrides))
    if file is not None:
        new = resolve_paths(resolve_model(file))
        # Micro-batches that it leaves unset keep the size that was planned.
        tokens = new.trainer.micro_batch_tokens or old.trainer.micro_batch_tokens
        new = new.with_values("trainer", micro_batch_tokens=tokens)
    check_resume(old, new)
    if end := describe_end(status, new.run):
        print(end)
        return run_dir
    run_checks(Facts(run_dir, new), SETTINGS)
    new = resolve_paths(job.resolve(new if context is None else context.apply_to(new)))
    job.check(new, run_dir)
    with disk_errors(run_dir.path), lock_run_dir(run_dir):
        return _run(job, new, run_dir, check_unchanged, context)


def check_unchanged(run_dir: RunDir, model: Path) -> None:
    """Raise if the checkpoint or the run's progress differs from the recorded one."""
    check_model_unchanged(run_dir, model)
    if run_dir.progress.exists():
        read_progress(run_dir)


def _run(
    job: TrainingJob[AnyRun],
    file: AnyRun,
    run_dir: RunDir,
    check_or_record_model: Callable[[RunDir, Path], None],
    context: TorchrunContext | None,
    on_recorded: Callable[[RunDir], object] = lambda run_dir: None,
) -> RunDir:
    run_checks(Facts(run_dir, file), STORE)
    check_or_record_model(run_dir, Path(file.model.path))
    run_dir.make()
    make_secret(run_dir)
    write_atomic(run_dir.config, dump_checked_toml(file).encode())
    on_recorded(run_dir)
    run_dir.summary.unlink(missing_ok=True)  # from before this resume
    specs = []
    for spec in job.build_specs(file, run_dir):
        is_trainer = spec.name == job.trainer and not spec.host
        specs += build_local_specs(spec, file.trainer, run_dir, context) if is_trainer else [spec]
    threads = ", ".join(f"{spec.name} {spec.threads}" for spec in specs)
    print(f"threads on {num_cores()} cores: {threads}")
    events = EventLog(run_dir.metrics, "launcher")
    processes = Processes(run_dir, job.command)
    supervise = _build_supervision(job, file, processes, specs, events, context)
    logging = file.logging if isinstance(file, RunFile) else LoggingConfig()
    sinks = feed_in_background(logging, run_dir, lambda words: events.write("sink", words=words))
    view = LiveView(run_dir, job.plain)
    failure, was_stopped = None, False
    try:
        # These were left by an earlier launcher that was killed.
        kill_marked(run_dir.path, [spec.name for spec in specs])
        with job.reserve(file, run_dir, specs), sinks, collect_signals() as signals:
            for spec in specs:
                processes.start(spec)
            was_stopped = watch_processes(processes, job.leader, view.update, signals, supervise)
    except ProcessFailed as error:
        failure = error
    finally:
        processes.kill()
        job.release(file, run_dir)
        call_view(view.update)
        call_view(view.close)
    stopped_by = failure.problem if failure else SIGNAL if was_stopped else ""
    # A second signal raises an error, but counts as a signal.
    was_stopped = was_stopped or (failure is not None and len(signals) > 1)
    outcome = "stopped" if was_stopped else "failed" if failure else "finished"
    events.write("end", outcome=outcome, problem=stopped_by, fix=failure.fix if failure else "")
    try:
        job.print_outcome(file, run_dir, stopped_by)
    except Exception as error:  # a view must not fail a run
        reason = str(error).partition("\n")[0]
        print(f"no summary: {type(error).__name__}: {reason}", file=sys.stderr)
    if was_stopped:
        print(f"resume: {processes.resume_command}", flush=True)
    if failure is not None:
        raise failure
    return run_dir


def _build_supervision(
    job: TrainingJob[AnyRun],
    file: AnyRun,
    processes: Processes,
    specs: list[ProcessSpec],
    events: EventLog,
    context: TorchrunContext | None,
) -> Callable[[], None]:
    """Return the function that supervises the processes. It is called repeatedly."""
    replace_broken = job.build_supervisor(file, processes, specs, events)
    trainers = [spec for spec in specs if spec.name.partition("-")[0] == job.trainer]
    ranks = [spec.name for spec in trainers]
    watchdog = TrainerWatchdog(processes, ranks, file.trainer.stall_timeout_s)
    restarts = file.launch.restart if isinstance(file, RunFile) else 0
    if restarts and context is not None and context.size > 1:
        raise ConfigError(
            f"[launch] restart = {restarts} cannot restart ranks that torchrun started",
            "set it to 0, and let torchrun restart the run with --resume",
        )

    def report(text: str) -> None:
        events.write("process", words=text)

    trainer = TrainerSupervisor(processes, trainers, watchdog, restarts, report)
    stopped = StoppedProcessWatch(processes.list_pids, report)

    def supervise() -> None:
        replace_broken()
        trainer.supervise()
        stopped.check()
        bound_logs(processes.run_dir.logs)

    return supervise


def run_as_follower(job: TrainingJob[AnyRun]) -> bool:
    """If torchrun started this process as a rank other than 0, run that trainer rank. Return
    whether it did."""
    context = find_context()
    if context is None or context.rank == 0:
        return False
    at = read_rendezvous(context)
    run_dir = RunDir(Path(at.run_dir))
    file = load_config(job.file_kind, run_dir.config)
    threads = max(1, job.count_trainer_threads(file) // context.local_size)
    trainer = build_local_spec(job.trainer, run_dir.path, threads)
    spec = build_rank_spec(trainer, context.rank, context.size, at)
    processes = Processes(run_dir, job.command)
    # Rank 0 ends this rank. Signals to the whole group are for rank 0's launcher.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watchdog = TrainerWatchdog(processes, [spec.name], file.trainer.stall_timeout_s)
    stopped = StoppedProcessWatch(processes.list_pids, print)

    def supervise() -> None:
        watchdog.check()
        stopped.check()
        bound_logs(run_dir.logs)

    processes.start(spec)
    watch_processes(processes, spec.name, lambda: None, (), supervise)
    return True
