"""The processes of a run: their resources and commands.

    run file --> plan --> started here, over ssh, as Ray actors or as Slurm steps
                      |--> printed: `--dry-run`, Kubernetes manifests

Every launcher uses this plan. The orchestrator runs next to the launcher and owns the run
directory. All other processes connect to it at one address.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.launch.process_spec import ProcessSpec, Resources, build_local_spec
from sightline.launch.processes import num_cores, split_threads
from sightline.launch.ray_run import build_command_prefix
from sightline.launch.slurm import build_step
from sightline.transport.listen import find_own_address, is_loopback

LEADER, TRAINER = "orchestrator", "trainer"


@dataclass(frozen=True)
class Endpoints:
    """Addresses at which a run's processes reach each other."""

    hub: str
    """Address of the orchestrator's channel."""
    servers: tuple[str, ...] = ()
    """Addresses of servers that are known before they start. Other servers report theirs."""
    evaluator: str = ""


def find_address(file: RunFile) -> str:
    """Return the address of this machine at which processes reach the orchestrator."""
    address = file.launch.address
    return find_own_address() if file.launch.on != "local" and is_loopback(address) else address


def has_evaluator(file: RunFile) -> bool:
    return file.eval.every > 0 and file.eval.tasks > 0


def find_resources(file: RunFile, name: str) -> Resources:
    """Return the resources that a process requests from a cluster."""
    settings, kind = file.launch.find_resources(name), name.partition("-")[0]
    threads, gpus, why = 1, 0, ""
    if kind in ("trainer", "server"):
        count, device, threads = file.trainer.ranks, file.trainer.device, file.trainer.threads
        why = f'[trainer] device = "{device}" and ranks = {count}'
        if kind == "server":
            device, threads = file.inference.device, file.inference.threads
            tensor, data = file.inference.tensor_parallel_size, file.inference.data_parallel_size
            count = tensor * data
            why = f'[inference] device = "{device}", tensor_parallel_size = {tensor} and '
            why += f"data_parallel_size = {data}"
        if device == "auto" and settings.gpus is None and file.launch.on != "local":
            raise ConfigError(
                f'device = "auto" of the {kind} does not say how many GPUs to request on '
                f"{file.launch.on}",
                f'set it to "cuda" or "cpu", or set gpus for {name} in [launch.resources]',
            )
        threads, gpus = threads or 4, count if device.startswith("cuda") else 0
    requested = gpus if settings.gpus is None else settings.gpus
    if file.launch.on != "local" and ceil(requested) < gpus:
        raise ConfigError(
            f"[launch.resources] has gpus = {requested:g} for {name}, which needs {gpus} on its "
            f"node ({why})",
            f'set gpus = {gpus}, lower those settings, or set device = "cpu"',
        )
    return Resources(
        cpus=threads if settings.cpus is None else settings.cpus,
        gpus=requested,
        memory_gb=settings.memory_gb,
        component=settings.slurm,
    )


def find_command_prefix(file: RunFile, name: str, run_id: str) -> list[str]:
    """Return the command prefix that runs a command on the process's machine. It is empty on
    Kubernetes, which starts the process itself."""
    if command := file.launch.find_host(name):
        return command
    if file.launch.on == "ray":
        return build_command_prefix(run_id, list_placed(file).index(name))
    if file.launch.on == "slurm":
        return build_step(name, find_resources(file, name), list(count_components(file)))
    return []


def list_placed(file: RunFile) -> list[str]:
    """Return the processes that the cluster places."""
    launch = file.launch
    return [n for n in list_names(file) if launch.is_elsewhere(n) and not launch.find_host(n)]


def count_components(file: RunFile) -> Counter[Resources]:
    """Return the components of a Slurm job: resources, and the number of processes that request
    them. The batch script (launcher and orchestrator) comes first. A job on one node has one."""
    resources = [find_resources(file, name) for name in (LEADER, *list_placed(file))]
    if str(file.launch.slurm.get("nodes")) != "1":
        return Counter(resources)
    if any(request.component for request in resources):
        raise ConfigError(
            "[launch.slurm] nodes = 1 conflicts with slurm in [launch.resources]: each component "
            "has its own nodes",
            "remove nodes, or slurm from the resources",
        )
    cpus, gpus = sum(r.cpus for r in resources), sum(ceil(r.gpus) for r in resources)
    return Counter([Resources(cpus, gpus, sum(r.memory_gb for r in resources))])


def list_names(file: RunFile) -> list[str]:
    """Return the names of the run's processes in starting order."""
    workers = [f"worker-{number}" for number in range(file.rollout.workers or 1)]
    evaluator = ["evaluator"] if has_evaluator(file) else []
    return [*file.server_names, *evaluator, TRAINER, *workers, LEADER]


def plan_run(file: RunFile, path: Path, run_id: str, at: Endpoints) -> list[ProcessSpec]:
    """Return the processes of the run in `path` in starting order, with one trainer for all
    ranks."""
    budget = split_threads(file, num_cores())
    threads = {"server": budget.server, TRAINER: max(1, budget.trainer // file.trainer.ranks)}
    options = ["--hub", at.hub, *(["--server", *at.servers] if at.servers else [])]
    options += ["--evaluator", at.evaluator] if at.evaluator else []

    def plan(name: str) -> ProcessSpec:
        resources = find_resources(file, name)
        python = file.rollout.python if name.startswith("worker-") else ""
        if file.launch.is_elsewhere(name):
            scratch = file.launch.scratch
            count = max(1, resources.cpus // (file.trainer.ranks if name == TRAINER else 1))
            arguments = ["process", name, scratch, "--join", *options, "--threads", str(count)]
            host = find_command_prefix(file, name, run_id)
            python = python or file.launch.python
            hidden = dict.fromkeys(list_hidden_variables(file, name), "")
            return ProcessSpec(name, arguments, count, hidden, python, host, resources)
        spec = build_local_spec(name, path, threads.get(name.partition("-")[0], 1), options)
        return replace(spec, python=python, resources=resources)

    return [plan(name) for name in list_names(file)]


def list_hidden_variables(file: RunFile, name: str) -> list[str]:
    """Return the environment variables that a process on another machine must not inherit. A worker
    gets its own token of the media service, and needs no control token."""
    if not name.startswith("worker-"):
        return []
    tokens = [file.inference.control_token]
    if file.media.root.startswith(("http://", "https://")):  # a media service
        tokens += [file.media.token, file.media.control_token]
    needed = file.inference.token
    return sorted(t.removeprefix("env:") for t in {*tokens} - {needed} if t.startswith("env:"))


def describe_plan(file: RunFile, specs: list[ProcessSpec]) -> str:
    """Describe each process: its machine, its resources and its command."""
    lines = []
    for spec in specs:
        where = f"on {file.launch.on}" if file.launch.is_elsewhere(spec.name) else "here"
        if file.launch.on == "slurm" and where == "here":
            where = "in the job's batch script"
        if file.launch.find_host(spec.name):
            where = f"by `{shlex.join(spec.host)}`"
        cpus = spec.threads if where == "here" else spec.resources.cpus
        memory = f", {spec.resources.memory_gb:g} GB" * bool(spec.resources.memory_gb)
        lines.append(f"{spec.name} ({where}): {cpus} CPU, {spec.resources.gpus:g} GPU{memory}")
        lines.append(f"    {shlex.join(spec.command)}")
    return "\n".join(lines)
