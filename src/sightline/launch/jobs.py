"""The jobs of `sightline rl` and `sightline sft`, and `train`, which starts one from Python."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.compute.weight_transport import find_transport
from sightline.config import RunFile, SftFile, validate_config
from sightline.config.load import read_run_file
from sightline.errors import ConfigError
from sightline.launch import ray_run
from sightline.launch.memory_plan import fill_in
from sightline.launch.process_spec import ProcessSpec, build_local_spec
from sightline.launch.processes import Processes, num_cores, reserve_port, split_threads
from sightline.launch.run_plan import (
    LEADER,
    TRAINER,
    Endpoints,
    find_address,
    has_evaluator,
    list_placed,
    plan_run,
)
from sightline.launch.supervision import (
    ServerSupervisor,
    WorkerSupervisor,
    get_memory_limit,
    resolve_workers,
)
from sightline.launch.training_run import TrainingJob, start_run
from sightline.orchestrator.server_pool import give_back_leases
from sightline.run import EventLog, RunDir
from sightline.run.run_dir import show_path
from sightline.run.server_changes import list_wanted
from sightline.view.notebook import Run, open_run
from sightline.view.report import write_report
from sightline.view.summary import print_summary, summarize


@dataclass
class RlJob(TrainingJob[RunFile]):
    """The job of `sightline rl`."""

    plain: bool = False
    is_job: bool = False
    """Whether a cluster's job runs this."""
    file_kind = RunFile
    command = "rl"
    leader = LEADER
    trainer = TRAINER

    def resolve(self, file: RunFile) -> RunFile:
        on = file.launch.on
        if on not in ("local", "ray") and not self.is_job:
            raise ConfigError(
                f'[launch] on = "{on}", but this process is not inside a {on} job',
                f"start it with `sightline rl FILE --on {on}`, or here with --on local",
            )
        file, why = resolve_workers(fill_in(file), num_cores())
        print(why)
        return file

    def count_trainer_threads(self, file: RunFile) -> int:
        return split_threads(file, num_cores()).trainer

    def build_specs(self, file: RunFile, run_dir: RunDir) -> list[ProcessSpec]:
        here, host, scheme = find_address(file), file.inference.host, file.inference.scheme
        hub = f"tcp://{here}:{reserve_port(here, file.launch.port, '[launch] port')}"
        servers = file.inference.servers
        if not servers and not file.launch.is_elsewhere("server"):
            port = reserve_port(host, file.inference.port, "[inference] port")
            servers = (f"{scheme}://{host}:{port}",)
        evaluator = ""
        if has_evaluator(file):
            evaluator = f"{scheme}://{host}:{reserve_port(host, 0, 'the port of the evaluator')}"
        specs = plan_run(file, run_dir.path, run_dir.read_id(), Endpoints(hub, servers, evaluator))
        if file.launch.on == "kubernetes":
            specs = [spec for spec in specs if not file.launch.is_elsewhere(spec.name)]
        return specs

    def build_supervisor(
        self, file: RunFile, processes: Processes, specs: list[ProcessSpec], events: EventLog
    ) -> Callable[[], None]:
        events.write("state", phase="starting", threads={spec.name: spec.threads for spec in specs})
        workers = WorkerSupervisor(
            processes,
            [spec for spec in specs if spec.name.startswith("worker-")],
            file.rollout.worker_hang_timeout_s,
            get_memory_limit(file),
            lambda name, why: events.write("lost", worker=name, reason=why),
        )
        # A restarted server must be able to adopt the newest weights.
        names = () if find_transport(file).is_sent_once else (*file.server_names, "evaluator")
        servers = ServerSupervisor(
            processes,
            [spec for spec in specs if spec.name in names],
            lambda words: events.write("process", words=words),
        )

        def supervise() -> None:
            workers.supervise()
            servers.supervise()

        return supervise

    def reserve(
        self, file: RunFile, run_dir: RunDir, specs: list[ProcessSpec]
    ) -> AbstractContextManager[None]:
        if file.launch.on != "ray":
            return nullcontext()
        placed = list_placed(file)
        return ray_run.reserve(run_dir.read_id(), [spec for spec in specs if spec.name in placed])

    def release(self, file: RunFile, run_dir: RunDir) -> None:
        with suppress(OSError):  # a read-only disk
            run_dir.server_report.unlink(missing_ok=True)
        servers = list(list_wanted(run_dir, file.inference.servers))
        if servers:
            token = file.inference.read_token(for_control=True)
            leases = give_back_leases(servers, token, run_dir.read_id())
            # Use another thread, because a notebook already runs an event loop in this one.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(asyncio.run, leases).result()

    def print_outcome(self, file: RunFile, run_dir: RunDir, stopped_by: str) -> None:
        """Print the summary and write the report."""
        print_summary(summarize(run_dir, **({"stopped_by": stopped_by} if stopped_by else {})))
        report = write_report(run_dir)
        # Print plain last lines for scripts.
        print(f"run: {show_path(run_dir.path)}")
        print(f"report: {show_path(report)}", flush=True)


class SftJob(TrainingJob[SftFile]):
    """The job of `sightline sft`."""

    file_kind = SftFile
    command = leader = trainer = "sft"
    plain = True

    def count_trainer_threads(self, file: SftFile) -> int:
        return file.trainer.threads or num_cores()

    def build_specs(self, file: SftFile, run_dir: RunDir) -> list[ProcessSpec]:
        Path(file.sft.output_dir).parent.mkdir(parents=True, exist_ok=True)
        threads = max(1, self.count_trainer_threads(file) // file.trainer.ranks)
        return [build_local_spec(self.trainer, run_dir.path, threads)]

    def print_outcome(self, file: SftFile, run_dir: RunDir, stopped_by: str) -> None:
        summarize(run_dir, **({"stopped_by": stopped_by} if stopped_by else {}))
        print(f"run: {show_path(run_dir.path)}")
        if not stopped_by:
            print(f"checkpoint: {file.sft.output_dir}")


def train(file: str | Path | dict[str, Any] | RunFile | SftFile, **overrides: Any) -> Run:
    """Train to the end and return the run: like `sightline sft` if the file has [sft], else like
    `sightline rl`.

    Overrides are sections, `run={"steps": 5}`, or settings, `**{"run.steps": 5}`. `env` may be an
    environment class that a module defines.
    """
    if isinstance(file, dict):
        values, where = copy.deepcopy(file), "train"
    elif isinstance(file, RunFile | SftFile):
        values, where = file.model_dump(exclude_none=True), "train"
    else:
        values, where = read_run_file(Path(file)), str(file)
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if key or (section == "env" and isinstance(value, type)):
            value = {key or "name": value}
        if not isinstance(value, dict):
            raise ConfigError(
                f"{name} = {value!r}", f'write {name}={{"key": ...}}, or **{{"{name}.key": ...}}'
            )
        values.setdefault(section, {}).update(value)
    env = values.get("env") or {}
    if isinstance(kind := env.get("name"), type):
        values["env"] = {**env, "name": f"{kind.__module__}:{kind.__qualname__}"}
    if "sft" in values:
        run_dir = start_run(SftJob(), validate_config(SftFile, values, where))
    else:
        run_dir = start_run(RlJob(), validate_config(RunFile, values, where))
    return open_run(run_dir.path)
