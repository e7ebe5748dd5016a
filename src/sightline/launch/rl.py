"""A whole reinforcement-learning run on one machine."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from sightline import config as config_module
from sightline.config import RunFile, Trainer, check_resume, dump
from sightline.errors import ProcessFailed, ResumeRefused
from sightline.launch import torchrun
from sightline.launch.claim import check_pinned, claim_run_dir, locked, pin_model
from sightline.launch.preflight import check_run, check_store, family_lines, resolve_model
from sightline.launch.processes import (
    SECRET,
    Processes,
    Signals,
    Spec,
    find_port,
    num_cores,
    share_threads,
    watch,
)
from sightline.launch.sinks import SinkProcess
from sightline.launch.torchrun import Place
from sightline.launch.trainers import Trainers
from sightline.launch.workers import Workers, memory_limit, resolve_workers
from sightline.monitor import EventLog, RunDir
from sightline.monitor.console import LiveView
from sightline.monitor.report import write_report
from sightline.monitor.summary import print_summary, summarize
from sightline.wire.file import write_atomic
from sightline.wire.share import name_of_rank

LEADER = "orchestrator"


def start_run(config: RunFile, plain: bool) -> RunDir:
    """Runs `config` from its first step, in a directory of its own."""
    place = torchrun.find_place()
    if place is not None:
        config = place.of(config)
    config, workers = resolve_workers(resolve_model(config), num_cores())
    print(workers)
    family = check_run(config, RunDir(Path(config.run.dir)))
    print(family_lines(family, config.inference.engine))
    run_dir = claim_run_dir(config.run.dir, config.run.name)
    with locked(run_dir):
        check_store(Path(config.media.root or run_dir.media), config.media.max_gb)
        run_dir.make()
        pin_model(run_dir, Path(config.model.path))
        write_atomic(run_dir.config, dump(config).encode())
        return _run(config, run_dir, plain, place)


def resume_run(path: Path, overrides: list[str], plain: bool) -> RunDir:
    """Goes on with a run that was stopped or killed."""
    run_dir = RunDir(path)
    if not run_dir.config.is_file():
        raise ResumeRefused(f"{path} is no run directory", "name the folder that holds config.toml")
    old = config_module.load(RunFile, run_dir.config)
    new = config_module.load(RunFile, run_dir.config, overrides)
    place = torchrun.find_place()
    if place is not None:
        new = place.of(new)
    new, workers = resolve_workers(new, num_cores())
    print(workers)
    check_resume(old, new)
    print(family_lines(check_run(new, run_dir), new.inference.engine))
    with locked(run_dir):
        check_pinned(run_dir, Path(new.model.path))
        check_store(Path(new.media.root or run_dir.media), new.media.max_gb)
        run_dir.make()
        write_atomic(run_dir.config, dump(new).encode())
        return _run(new, run_dir, plain, place)


def _specs(config: RunFile, run_dir: RunDir, place: Place | None) -> list[Spec]:
    threads = share_threads(config, num_cores())
    host = config.inference.host
    hub = f"tcp://127.0.0.1:{find_port('127.0.0.1', 0, 'port of the hub')}"
    servers = list(config.inference.servers) or [
        f"http://{host}:{find_port(host, config.inference.port, '[inference] port')}"
    ]
    evaluates = config.eval.every > 0 and config.eval.tasks > 0
    evaluator = f"http://{host}:{find_port(host, 0, 'port of the evaluator')}" if evaluates else ""

    def spec(name: str, count: int) -> Spec:
        words = ["process", name, str(run_dir.path), "--hub", hub, "--server", *servers]
        words += ["--threads", str(count), "--parent", str(os.getpid())]
        words += ["--evaluator", evaluator] if evaluates else []
        return Spec(name, words, count)

    trainer = spec("trainer", max(1, threads.trainer // config.trainer.ranks))
    workers = [
        replace(spec(f"worker-{i}", 1), python=config.rollout.python)
        for i in range(config.rollout.workers)
    ]
    return [
        *([] if config.inference.servers else [spec("server", threads.server)]),
        *([spec("evaluator", 1)] if evaluates else []),
        *_ranks(trainer, config, run_dir, place),
        *workers,
        spec(LEADER, 1),
    ]


def _ranks(trainer: Spec, config: RunFile, run_dir: RunDir, place: Place | None) -> list[Spec]:
    """Those that this launcher starts; torchrun starts the others."""
    specs = trainer_specs(trainer, config.trainer)
    if place is None or place.size == 1:
        return specs
    from sightline.trainer.meeting import Meeting

    said = dict(zip(specs[0].arguments, specs[0].arguments[1:], strict=False))
    meeting = Meeting(
        run_dir=str(run_dir.path.resolve()),
        meet=said["--meet"],
        channel=said["--channel"],
        secret=specs[0].variables[SECRET],
    )
    torchrun.board_of(place).post(meeting)
    return specs[:1]


def trainer_specs(trainer: Spec, settings: Trainer) -> list[Spec]:
    """The trainer's processes: its own name is rank 0's, NAME-1 and so on are the others'."""
    if settings.ranks == 1:
        return [trainer]
    here = settings.address
    meet = f"{here}:{find_port(here, 0, '[trainer] address')}"
    channel = f"tcp://{here}:{find_port(here, 0, '[trainer] address')}"
    secret = {SECRET: settings.secret or secrets.token_hex(16)}
    num = settings.ranks
    found = []
    for rank in range(num):
        name = name_of_rank(rank, trainer.name)
        words = [*trainer.arguments, "--rank", str(rank), "--ranks", str(num)]
        words += ["--meet", meet, "--channel", channel]
        words[1] = name
        found.append(Spec(name, words, trainer.threads, secret))
    return found


def _run(config: RunFile, run_dir: RunDir, plain: bool, place: Place | None) -> RunDir:
    console = Console()
    specs = _specs(config, run_dir, place)
    threads = ", ".join(f"{spec.name} {spec.threads}" for spec in specs)
    console.print(f"threads on {num_cores()} cores: {threads}", highlight=False)
    events = EventLog(run_dir.metrics, "launcher")
    events.write("state", phase="starting", threads={spec.name: spec.threads for spec in specs})
    notes = _Notes(events)
    processes = Processes(run_dir)
    workers = Workers(
        processes,
        [spec for spec in specs if spec.name.startswith("worker-")],
        config.rollout.hang_s,
        memory_limit(config),
        on_lost=notes.lost,
    )
    trainers = Trainers(
        processes,
        [spec.name for spec in specs if spec.name.startswith("trainer")],
        config.trainer.stuck_after_s,
    )

    def tend() -> None:
        workers.tend()
        trainers.check()

    view = LiveView(run_dir, plain)
    try:
        with SinkProcess(config.monitor, run_dir, notes.sink), Signals() as signals:
            for spec in specs:
                processes.start(spec)
            stopped = watch(processes, LEADER, view.update, signals, tend)
        view.update()
    except ProcessFailed as error:
        view.close()
        _close(run_dir, console, error.problem)
        raise
    finally:
        view.close()
        processes.kill()
    _close(run_dir, console, "a signal" if stopped else "")
    return run_dir


@dataclass
class _Notes:
    events: EventLog

    def sink(self, words: str) -> None:
        self.events.write("sink", words=words)

    def lost(self, name: str, why: str) -> None:
        self.events.write("lost", worker=name, reason=why)


def _close(run_dir: RunDir, console: Console, stopped_by: str) -> None:
    """Summary and report, whichever way the run ended."""
    extra = {"stopped_by": stopped_by} if stopped_by else {}
    print_summary(summarize(run_dir, **extra), console)
    report = write_report(run_dir)
    # The last lines, bare, so that scripts can read them.
    print(f"run: {run_dir.path}")
    print(f"report: {report}", flush=True)
