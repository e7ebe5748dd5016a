"""Reinforcement learning on one machine: a server, a trainer, workers and an orchestrator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rich.console import Console

from sightline.config import LoggingConfig, RunFile
from sightline.launch.claim import read_secret
from sightline.launch.preflight import Show, check_run, describe_family, say_nothing
from sightline.launch.processes import (
    Processes,
    ProcessSpec,
    num_cores,
    reserve_port,
    split_threads,
)
from sightline.launch.training_run import TrainingJob
from sightline.launch.worker_supervisor import WorkerSupervisor, get_memory_limit, resolve_workers
from sightline.orchestrator.server_leases import give_back_leases
from sightline.run import EventLog, RunDir
from sightline.run.run_dir import show_path
from sightline.view.console import LiveView
from sightline.view.report import write_report
from sightline.view.summary import print_summary, summarize


@dataclass(frozen=True)
class RlJob(TrainingJob[RunFile]):
    """What `sightline rl` runs."""

    plain: bool = False
    """Whether plain lines take the place of the live view."""
    file_kind = RunFile
    command = "rl"
    leader = "orchestrator"
    trainer = "trainer"

    def resolve(self, file: RunFile) -> RunFile:
        file, why = resolve_workers(file, num_cores())
        print(why)
        return file

    def check(self, file: RunFile, run_dir: RunDir, show: Show = say_nothing) -> None:
        print(describe_family(check_run(file, run_dir, show), file.inference.engine))

    def count_trainer_threads(self, file: RunFile) -> int:
        return split_threads(file, num_cores()).trainer

    def build_specs(self, file: RunFile, run_dir: RunDir) -> list[ProcessSpec]:
        threads = split_threads(file, num_cores())
        host = file.inference.host
        hub = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port of the hub')}"
        servers = list(file.inference.servers) or [
            f"http://{host}:{reserve_port(host, file.inference.port, '[inference] port')}"
        ]
        words = ["--hub", hub, "--server", *servers, "--parent", str(os.getpid())]
        evaluates = file.eval.every > 0 and file.eval.tasks > 0
        if evaluates:
            evaluator = f"http://{host}:{reserve_port(host, 0, 'port of the evaluator')}"
            words += ["--evaluator", evaluator]

        def spec(name: str, count: int) -> ProcessSpec:
            arguments = ["process", name, str(run_dir.path), *words, "--threads", str(count)]
            return ProcessSpec(name, arguments, count)

        workers = [spec(f"worker-{i}", 1) for i in range(file.rollout.workers)]
        return [
            *([] if file.inference.servers else [spec("server", threads.server)]),
            *([spec("evaluator", 1)] if evaluates else []),
            spec(self.trainer, max(1, threads.trainer // file.trainer.ranks)),
            *(replace(worker, python=file.rollout.python) for worker in workers),
            spec(self.leader, 1),
        ]

    def build_supervisor(
        self, file: RunFile, processes: Processes, specs: list[ProcessSpec], events: EventLog
    ) -> Callable[[], None]:
        events.write("state", phase="starting", threads={spec.name: spec.threads for spec in specs})
        return WorkerSupervisor(
            processes,
            [spec for spec in specs if spec.name.startswith("worker-")],
            file.rollout.worker_hang_timeout_s,
            get_memory_limit(file),
            lambda name, why: events.write("lost", worker=name, reason=why),
        ).supervise

    def get_logging(self, file: RunFile) -> LoggingConfig:
        return file.logging

    def release(self, file: RunFile, run_dir: RunDir) -> None:
        if file.inference.servers and file.inference.engine != "stock_vllm":
            token = file.inference.read_token(read_secret(run_dir))
            leases = give_back_leases(file.inference.servers, token, run_dir.read_id())
            # In a thread, for the event loop of a notebook is taken.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(asyncio.run, leases).result()

    def open_view(self, file: RunFile, run_dir: RunDir) -> LiveView:
        return LiveView(run_dir, self.plain)

    def print_outcome(self, file: RunFile, run_dir: RunDir, stopped_by: str) -> None:
        """Prints the summary and writes the report, whichever way the run ended."""
        extra = {"stopped_by": stopped_by} if stopped_by else {}
        print_summary(summarize(run_dir, **extra), Console())
        report = write_report(run_dir)
        # The last lines, bare, so that scripts can read them.
        print(f"run: {show_path(run_dir.path)}")
        print(f"report: {show_path(report)}", flush=True)
