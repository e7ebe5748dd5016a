"""A whole reinforcement-learning run on one machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from sightline import config as config_module
from sightline.config import RunFile, check_resume, dump
from sightline.errors import ResumeRefused
from sightline.launch.preflight import check_run
from sightline.launch.processes import (
    Processes,
    Spec,
    find_port,
    num_cores,
    share_threads,
    watch,
)
from sightline.monitor import EventLog, RunDir
from sightline.monitor.console import LiveView
from sightline.monitor.report import write_report
from sightline.monitor.summary import print_summary, summarize

LEADER = "orchestrator"


def new_run_dir(base: str, name: str) -> RunDir:
    """The next free `base/name-NNN`."""
    number = 1
    while (path := Path(base) / f"{name}-{number:03d}").exists():
        number += 1
    return RunDir(path)


def start_run(config: RunFile, plain: bool) -> RunDir:
    """Runs `config` from its first step, in a directory of its own."""
    run_dir = new_run_dir(config.run.dir, config.run.name)
    check_run(config, run_dir)
    run_dir.make()
    run_dir.config.write_text(dump(config))
    return _run(config, run_dir, plain)


def resume_run(path: Path, overrides: list[str], plain: bool) -> RunDir:
    """Goes on with a run that was stopped or killed."""
    run_dir = RunDir(path)
    if not run_dir.config.is_file():
        raise ResumeRefused(f"{path} is no run directory", "name the folder that holds config.toml")
    old = config_module.load(RunFile, run_dir.config)
    new = config_module.load(RunFile, run_dir.config, overrides)
    check_resume(old, new)
    check_run(new, run_dir)
    run_dir.make()
    run_dir.config.write_text(dump(new))
    return _run(new, run_dir, plain)


def _specs(config: RunFile, run_dir: RunDir) -> list[Spec]:
    threads = share_threads(config, num_cores())
    host = config.inference.host
    hub = f"tcp://127.0.0.1:{find_port('127.0.0.1', 0, 'port of the hub')}"
    server = f"http://{host}:{find_port(host, config.inference.port, '[inference] port')}"

    def spec(name: str, count: int) -> Spec:
        words = ["process", name, str(run_dir.path), "--hub", hub, "--server", server]
        return Spec(name, [*words, "--threads", str(count)], count)

    workers = [spec(f"worker-{i}", 1) for i in range(config.rollout.workers)]
    return [
        spec("server", threads.server),
        spec("trainer", threads.trainer),
        *workers,
        spec(LEADER, 1),
    ]


def _run(config: RunFile, run_dir: RunDir, plain: bool) -> RunDir:
    console = Console()
    specs = _specs(config, run_dir)
    threads = ", ".join(f"{spec.name} {spec.threads}" for spec in specs)
    console.print(f"threads on {num_cores()} cores: {threads}", highlight=False)
    EventLog(run_dir.metrics, "launcher").write(
        "state", phase="starting", threads={spec.name: spec.threads for spec in specs}
    )
    processes = Processes(run_dir)
    view = LiveView(run_dir, plain)
    try:
        for spec in specs:
            processes.start(spec)
        stopped = watch(processes, LEADER, view.update)
        view.update()
    finally:
        view.close()
        processes.kill()
    extra = {"stopped_by": "a signal"} if stopped else {}
    print_summary(summarize(run_dir, **extra), console)
    report = write_report(run_dir)
    # The last lines, bare, so that scripts can read them.
    print(f"run: {run_dir.path}")
    print(f"report: {report}")
    return run_dir
