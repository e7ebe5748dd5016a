"""A whole reinforcement-learning run on one machine."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from sightline import config as config_module
from sightline.config import RunFile, TrainerConfig, check_resume, dump_toml
from sightline.errors import ProcessFailed, ResumeRefused
from sightline.launch import torchrun
from sightline.launch.claim import (
    check_model_unchanged,
    claim_run_dir,
    lock_run_dir,
    record_model_digests,
)
from sightline.launch.preflight import check_run, check_store, describe_family, resolve_model
from sightline.launch.processes import (
    SECRET_VARIABLE,
    Processes,
    ProcessSpec,
    SignalCounter,
    find_port,
    num_cores,
    split_threads,
    watch_processes,
)
from sightline.launch.sink_process import SinkProcess
from sightline.launch.torchrun import TorchrunContext
from sightline.launch.trainer_watchdog import TrainerWatchdog
from sightline.launch.worker_supervisor import WorkerSupervisor, get_memory_limit, resolve_workers
from sightline.run import EventLog, RunDir
from sightline.view.console import LiveView
from sightline.view.report import write_report
from sightline.view.summary import print_summary, summarize
from sightline.wire.file import write_atomic
from sightline.wire.rank_messages import rank_process_name

LEADER = "orchestrator"


def start_run(config: RunFile, plain: bool) -> RunDir:
    """Runs `config` from its first step, in a directory of its own."""
    context = torchrun.find_context()
    if context is not None:
        config = context.apply_to(config)
    config, workers = resolve_workers(resolve_model(config), num_cores())
    print(workers)
    family = check_run(config, RunDir(Path(config.run.dir)))
    print(describe_family(family, config.inference.engine))
    run_dir = claim_run_dir(config.run.dir, config.run.name)
    with lock_run_dir(run_dir):
        check_store(Path(config.media.root or run_dir.media), config.media.max_gb)
        run_dir.make()
        record_model_digests(run_dir, Path(config.model.path))
        write_atomic(run_dir.config, dump_toml(config).encode())
        return _run(config, run_dir, plain, context)


def resume_run(path: Path, overrides: list[str], plain: bool) -> RunDir:
    """Goes on with a run that was stopped or killed."""
    run_dir = RunDir(path)
    if not run_dir.config.is_file():
        raise ResumeRefused(f"{path} is no run directory", "name the folder that holds config.toml")
    old = config_module.load_config(RunFile, run_dir.config)
    new = config_module.load_config(RunFile, run_dir.config, overrides)
    context = torchrun.find_context()
    if context is not None:
        new = context.apply_to(new)
    new, workers = resolve_workers(new, num_cores())
    print(workers)
    check_resume(old, new)
    print(describe_family(check_run(new, run_dir), new.inference.engine))
    with lock_run_dir(run_dir):
        check_model_unchanged(run_dir, Path(new.model.path))
        check_store(Path(new.media.root or run_dir.media), new.media.max_gb)
        run_dir.make()
        write_atomic(run_dir.config, dump_toml(new).encode())
        return _run(new, run_dir, plain, context)


def _build_specs(
    config: RunFile, run_dir: RunDir, context: TorchrunContext | None
) -> list[ProcessSpec]:
    threads = split_threads(config, num_cores())
    host = config.inference.host
    hub = f"tcp://127.0.0.1:{find_port('127.0.0.1', 0, 'port apply_to the hub')}"
    servers = list(config.inference.servers) or [
        f"http://{host}:{find_port(host, config.inference.port, '[inference] port')}"
    ]
    evaluates = config.eval.every > 0 and config.eval.tasks > 0
    evaluator = (
        f"http://{host}:{find_port(host, 0, 'port apply_to the evaluator')}" if evaluates else ""
    )

    def spec(name: str, count: int) -> ProcessSpec:
        words = ["process", name, str(run_dir.path), "--hub", hub, "--server", *servers]
        words += ["--threads", str(count), "--parent", str(os.getpid())]
        words += ["--evaluator", evaluator] if evaluates else []
        return ProcessSpec(name, words, count)

    trainer = spec("trainer", max(1, threads.trainer // config.trainer.ranks))
    workers = [
        replace(spec(f"worker-{i}", 1), python=config.rollout.python)
        for i in range(config.rollout.workers)
    ]
    return [
        *([] if config.inference.servers else [spec("server", threads.server)]),
        *([spec("evaluator", 1)] if evaluates else []),
        *_build_rank_specs(trainer, config, run_dir, context),
        *workers,
        spec(LEADER, 1),
    ]


def _build_rank_specs(
    trainer: ProcessSpec, config: RunFile, run_dir: RunDir, context: TorchrunContext | None
) -> list[ProcessSpec]:
    """Those that this launcher starts; torchrun starts the others."""
    specs = build_trainer_specs(trainer, config.trainer)
    if context is None or context.size == 1:
        return specs
    from sightline.trainer.rendezvous import RendezvousInfo

    said = dict(zip(specs[0].arguments, specs[0].arguments[1:], strict=False))
    meeting = RendezvousInfo(
        run_dir=str(run_dir.path.resolve()),
        meet=said["--meet"],
        channel=said["--channel"],
        secret=specs[0].variables[SECRET_VARIABLE],
    )
    torchrun.get_board(context).post(meeting)
    return specs[:1]


def build_trainer_specs(trainer: ProcessSpec, settings: TrainerConfig) -> list[ProcessSpec]:
    """The trainer's processes: its own name is rank 0's, NAME-1 and so on are the others'."""
    if settings.ranks == 1:
        return [trainer]
    here = settings.address
    meet = f"{here}:{find_port(here, 0, '[trainer] address')}"
    channel = f"tcp://{here}:{find_port(here, 0, '[trainer] address')}"
    secret = {SECRET_VARIABLE: settings.secret or secrets.token_hex(16)}
    num = settings.ranks
    found = []
    for rank in range(num):
        name = rank_process_name(rank, trainer.name)
        words = [*trainer.arguments, "--rank", str(rank), "--ranks", str(num)]
        words += ["--meet", meet, "--channel", channel]
        words[1] = name
        found.append(ProcessSpec(name, words, trainer.threads, secret))
    return found


def _run(config: RunFile, run_dir: RunDir, plain: bool, context: TorchrunContext | None) -> RunDir:
    console = Console()
    specs = _build_specs(config, run_dir, context)
    threads = ", ".join(f"{spec.name} {spec.threads}" for spec in specs)
    console.print(f"threads on {num_cores()} cores: {threads}", highlight=False)
    events = EventLog(run_dir.metrics, "launcher")
    events.write("state", phase="starting", threads={spec.name: spec.threads for spec in specs})
    notes = _LauncherEvents(events)
    processes = Processes(run_dir)
    workers = WorkerSupervisor(
        processes,
        [spec for spec in specs if spec.name.startswith("worker-")],
        config.rollout.worker_hang_timeout_s,
        get_memory_limit(config),
        on_lost=notes.lost,
    )
    trainers = TrainerWatchdog(
        processes,
        [spec.name for spec in specs if spec.name.startswith("trainer")],
        config.trainer.stall_timeout_s,
    )

    def supervise() -> None:
        workers.supervise()
        trainers.check()

    view = LiveView(run_dir, plain)
    try:
        with SinkProcess(config.logging, run_dir, notes.sink), SignalCounter() as signals:
            for spec in specs:
                processes.start(spec)
            stopped = watch_processes(processes, LEADER, view.update, signals, supervise)
        view.update()
    except ProcessFailed as error:
        view.close()
        _print_outcome(run_dir, console, error.problem)
        raise
    finally:
        view.close()
        processes.kill()
    _print_outcome(run_dir, console, "a signal" if stopped else "")
    return run_dir


@dataclass
class _LauncherEvents:
    events: EventLog

    def sink(self, words: str) -> None:
        self.events.write("sink", words=words)

    def lost(self, name: str, why: str) -> None:
        self.events.write("lost", worker=name, reason=why)


def _print_outcome(run_dir: RunDir, console: Console, stopped_by: str) -> None:
    """Summary and report, whichever way the run ended."""
    extra = {"stopped_by": stopped_by} if stopped_by else {}
    print_summary(summarize(run_dir, **extra), console)
    report = write_report(run_dir)
    # The last lines, bare, so that scripts can read them.
    print(f"run: {run_dir.path}")
    print(f"report: {report}", flush=True)
