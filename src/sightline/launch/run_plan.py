"""What a run is made of: its processes, what each asks for, its command and what follows its end.

    run file --> plan --> started here, by ssh, as actors of Ray, as steps of Slurm
                      |--> printed: `--dry-run`, Kubernetes manifests

Every launcher takes this plan. The orchestrator is beside the launcher and owns the run directory;
all others reach it at one address.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from sightline.compute.weight_transport import find_transport
from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.launch.process_spec import ProcessSpec, Resources
from sightline.launch.processes import num_cores, split_threads
from sightline.launch.ray_run import build_command_prefix
from sightline.launch.slurm import build_step
from sightline.transport.listen import find_own_address, is_loopback

LEADER, TRAINER = "orchestrator", "trainer"


@dataclass(frozen=True)
class Endpoints:
    """Where the processes of a run find one another."""

    hub: str
    """Address of the orchestrator's channel."""
    servers: tuple[str, ...] = ()
    """Servers whose addresses are known before they start; others say where they are."""
    evaluator: str = ""


def find_address(file: RunFile) -> str:
    """The address of this machine at which processes of the run find the orchestrator."""
    address = file.launch.address
    return find_own_address() if file.launch.on != "local" and is_loopback(address) else address


def has_evaluator(file: RunFile) -> bool:
    return file.eval.every > 0 and file.eval.tasks > 0


def find_resources(file: RunFile, name: str) -> Resources:
    """What the process asks a cluster for."""
    given, kind = file.launch.find_resources(name), name.partition("-")[0]
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
        if device == "auto" and "gpus" not in given and file.launch.on != "local":
            raise ConfigError(
                f'device = "auto" of the {kind} on {file.launch.on}: nobody knows how many GPUs to '
                "ask for",
                f'set it to "cuda" or "cpu", or gpus for {name} in [launch.resources]',
            )
        threads, gpus = threads or 4, count if device.startswith("cuda") else 0
    asked = given.get("gpus", gpus)
    if file.launch.on != "local" and ceil(asked) < gpus:
        raise ConfigError(
            f"[launch.resources] has gpus = {asked:g} for {name}, which needs {gpus} on its node "
            f"({why})",
            f'write gpus = {gpus}, lower those, or set device = "cpu"',
        )
    return Resources(
        cpus=int(given.get("cpus", threads)),
        gpus=asked,
        memory_gb=given.get("memory_gb", 0),
        component=str(given.get("slurm", "")),
    )


def find_command_prefix(
    file: RunFile, name: str, resources: Resources, run_id: str, components: Sequence[Resources]
) -> list[str]:
    """The words that run a command where the process is to be; none for this machine, and where
    the cluster starts it by itself."""
    if words := file.launch.find_host(name):
        return words
    if not file.launch.is_elsewhere(name) or file.launch.cluster_starts_processes:
        return []
    if file.launch.on == "slurm":
        return build_step(name, resources, components)
    return build_command_prefix(name, resources, run_id, list_placed(file).index(name))


def list_placed(file: RunFile) -> list[str]:
    """The processes that the cluster places."""
    launch = file.launch
    return [n for n in list_names(file) if launch.is_elsewhere(n) and not launch.find_host(n)]


def count_components(file: RunFile) -> Counter[Resources]:
    """The components of a job of Slurm: what its processes ask for, and how many ask for it, the
    batch script (launcher and orchestrator) first. All of a job on one node are one component."""
    asked = [find_resources(file, name) for name in (LEADER, *list_placed(file))]
    if str(file.launch.slurm.get("nodes")) != "1":
        return Counter(asked)
    if any(one.component for one in asked):
        raise ConfigError(
            "[launch.slurm] nodes = 1, and [launch.resources] has components of their own",
            "remove nodes, or slurm from the resources: each component has nodes of its own",
        )
    cpus, gpus = sum(one.cpus for one in asked), sum(ceil(one.gpus) for one in asked)
    return Counter([Resources(cpus, gpus, sum(one.memory_gb for one in asked))])


def list_names(file: RunFile) -> list[str]:
    """The processes of the run, in the order of their start."""
    workers = [f"worker-{number}" for number in range(file.rollout.workers or 1)]
    evaluator = ["evaluator"] if has_evaluator(file) else []
    return [*file.server_names, *evaluator, TRAINER, *workers, LEADER]


def plan_run(file: RunFile, path: Path, run_id: str, at: Endpoints) -> list[ProcessSpec]:
    """The processes of the run in the directory `path`, in the order of their start; one trainer
    for all its ranks."""
    budget = split_threads(file, num_cores())
    threads = {"server": budget.server, TRAINER: max(1, budget.trainer // file.trainer.ranks)}
    words = ["--hub", at.hub, *(["--server", *at.servers] if at.servers else [])]
    words += ["--evaluator", at.evaluator] if at.evaluator else []
    components = list(count_components(file)) if file.launch.on == "slurm" else []

    def plan(name: str) -> ProcessSpec:
        asked = find_resources(file, name)
        python = file.rollout.python if name.startswith("worker-") else ""
        if file.launch.is_elsewhere(name):
            scratch = file.launch.scratch
            count = max(1, asked.cpus // (file.trainer.ranks if name == TRAINER else 1))
            arguments = ["process", name, scratch, "--join", *words, "--threads", str(count)]
            host = find_command_prefix(file, name, asked, run_id, components)
            python = python or file.launch.python
            return ProcessSpec(name, arguments, count, {}, python, host, asked)
        count = threads.get(name.partition("-")[0], 1)
        parent = ["--parent", str(os.getpid()), "--threads", str(count)]
        arguments = ["process", name, str(path), *words, *parent]
        return ProcessSpec(name, arguments, count, {}, python, (), asked)

    return [plan(name) for name in list_names(file)]


def describe_plan(file: RunFile, specs: list[ProcessSpec]) -> str:
    """A paragraph for each process: where it runs, what it asks for, and its command."""
    lines = []
    for spec in specs:
        asked = spec.resources
        where = f"on {file.launch.on}" if file.launch.is_elsewhere(spec.name) else "here"
        if file.launch.on == "slurm" and where == "here":
            where = "in the job's batch script"
        if file.launch.find_host(spec.name):
            where = f"by `{shlex.join(spec.host)}`"
        asked = asked if where != "here" else replace(asked, cpus=spec.threads)
        lines.append(f"{spec.name} ({where}): {_describe(asked)}; {_describe_end(file, spec)}")
        lines.append(f"    {shlex.join(spec.command)}")
    return "\n".join(lines)


def _describe(asked: Resources) -> str:
    memory = f", {asked.memory_gb:g} GB" if asked.memory_gb else ""
    return f"{asked.cpus} CPU, {asked.gpus:g} GPU{memory}"


def describe_total(file: RunFile) -> str:
    """What the cluster is asked for in all."""
    # The launcher is a job of these itself, with the orchestrator.
    names = [*([LEADER] if file.launch.on in ("slurm", "kubernetes") else []), *list_placed(file)]
    asked = [find_resources(file, name) for name in names]
    # Ray alone shares a GPU.
    gpus = sum(one.gpus if file.launch.on == "ray" else ceil(one.gpus) for one in asked)
    cpus = sum(one.cpus for one in asked)
    total = _describe(Resources(cpus, gpus, sum(one.memory_gb for one in asked)))
    parts = f"{len(names)} {'pods' if file.launch.on == 'kubernetes' else 'processes'}"
    if file.launch.on == "slurm":
        parts += f", {len(count_components(file))} nodes or more"
    return f"in all on {file.launch.on}: {total}; {parts}"


def _describe_end(file: RunFile, spec: ProcessSpec) -> str:
    """What follows when the process ends with an error."""
    if spec.name == LEADER:
        return "its end is that of the run"
    if file.launch.cluster_starts_processes and file.launch.is_elsewhere(spec.name):
        return f"{file.launch.on} starts it again"
    restarts = file.launch.restart
    if spec.name == TRAINER:
        return f"started again {restarts} times" if restarts else "its failure ends the run"
    if not spec.name.startswith("worker-") and find_transport(file).is_sent_once:
        return "its failure ends the run"
    return "started again"


def describe_address(file: RunFile) -> str:
    """Where the hub would be, for a plan that is only shown."""
    return f"tcp://{find_address(file)}:{file.launch.port or 'PORT'}"
