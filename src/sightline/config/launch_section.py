"""`[launch]` of a run file: what starts the processes of a run, where, and with which resources."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any, Literal

from pydantic import Field, field_validator

from sightline.config.secret_refs import InvalidSetting
from sightline.config.section import ConfigSection, Keywords, Mutable
from sightline.errors import ConfigError

BESIDE_LAUNCHER = ("orchestrator", "evaluator")
RESOURCES = ("cpus", "gpus", "memory_gb", "slurm")


class LaunchConfig(ConfigSection):
    """How the processes of a run are started, and where."""

    on: Mutable[Literal["local", "ray", "slurm", "kubernetes"]] = "local"
    """Where the trainer, servers and workers run: on this machine (and `hosts`), on a Ray cluster,
    in a Slurm job, or in Kubernetes pods, which Kubernetes itself starts."""
    num_servers: Mutable[int] = Field(1, ge=1)
    """Number of inference servers that the run starts; more than one on other machines alone."""
    resources: Mutable[Keywords] = {}
    """What a process asks a cluster for, by patterns of process names (trainer, server*, worker-*,
    and on Slurm and Kubernetes orchestrator, for the launcher's job): tables with cpus, gpus,
    memory_gb (of 10^9 bytes), and slurm, the options of a component of its own."""
    slurm: Mutable[Keywords] = {}
    """Options of sbatch for the job, by their long names: partition, account, time."""
    kubernetes: Mutable[Keywords] = {}
    """What the manifests name: image, namespace, volume_claim, node_selector, env_from."""
    hosts: Mutable[Keywords] = {}
    """Processes that run on other machines, by patterns of their names (trainer, worker-*,
    server*), each with the words that run a command there, such as "ssh gpu-1"."""
    address: Mutable[str] = "127.0.0.1"
    """Address of this machine at which processes on others find the orchestrator; on a cluster
    127.0.0.1 is the one that the network is reached from."""
    port: Mutable[int] = Field(0, ge=0, le=65535)
    """Port of the orchestrator there; 0 takes a free one."""
    python: Mutable[str] = "python3"
    """Interpreter on other machines, with Sightline installed."""
    scratch: Mutable[str] = "/tmp"
    """Folder on other machines under which a process has its copy of what it needs of the run."""
    restart: Mutable[int] = Field(0, ge=0)
    """How often a trainer that ends with an error is started again, from its last checkpoint. On
    Kubernetes, the manifests decide."""

    @field_validator("hosts")
    @classmethod
    def _hosts_are_commands(cls, hosts: Keywords) -> Keywords:
        for name, words in hosts.items():
            if not isinstance(words, str) or not words.split():
                raise InvalidSetting(
                    f"hosts: {name} = {words!r} is no command",
                    'write the words that run a command there, such as "ssh gpu-1"',
                )
            if beside := [one for one in BESIDE_LAUNCHER if fnmatch(one, name)]:
                raise InvalidSetting(
                    f"hosts: {name} names the {beside[0]}, which is beside the launcher",
                    "write patterns of the others: trainer, server*, worker-*",
                )
        return hosts

    @field_validator("resources")
    @classmethod
    def _resources_are_numbers(cls, resources: Keywords) -> Keywords:
        for pattern, table in resources.items():
            if not isinstance(table, dict) or not table.keys() <= set(RESOURCES):
                raise InvalidSetting(
                    f"resources: {pattern} = {table!r} is no table of {', '.join(RESOURCES)}",
                    "write {cpus = 8, gpus = 1, memory_gb = 64}",
                )
            for key, value in table.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if key != "slurm" and (not is_number or value < 0):
                    raise InvalidSetting(
                        f"resources: {pattern} has {key} = {value!r}", "write a number"
                    )
        return resources

    def find_host(self, name: str) -> list[str]:
        """The words that run a command on the machine of the process, where `hosts` has some."""
        return shlex.split(self._find(self.hosts, name) or "")

    def find_resources(self, name: str) -> dict[str, Any]:
        """What `resources` asks for the process."""
        return self._find(self.resources, name) or {}

    def is_elsewhere(self, name: str) -> bool:
        """Whether the process does not see the run directory."""
        is_placed = self.on != "local" or bool(self.find_host(name))
        return is_placed and name not in BESIDE_LAUNCHER

    def check_patterns(self, names: Iterable[str]) -> None:
        """Refuses what names none of these processes of the run."""
        placed = [name for name in names if name not in BESIDE_LAUNCHER]
        # Where the launcher is a job itself, it asks for what the orchestrator does.
        asking = [*placed, *(["orchestrator"] if self.on in ("slurm", "kubernetes") else [])]
        resources = self.resources if self.on != "local" else {}
        for setting, table, known in (
            ("hosts", self.hosts, placed),
            ("resources", resources, asking),
        ):
            for pattern in table:
                if not any(fnmatch(name, pattern) for name in known):
                    raise ConfigError(
                        f"[launch] {setting} has {pattern!r}, which names no process that runs "
                        "elsewhere",
                        f"the run has {', '.join(known)}",
                    )

    @property
    def cluster_starts_processes(self) -> bool:
        """Whether the cluster starts the processes, and not the launcher."""
        return self.on == "kubernetes"

    @property
    def has_other_machines(self) -> bool:
        return self.on != "local" or bool(self.hosts)

    def _find(self, table: Keywords, name: str) -> Any:
        return next((value for pattern, value in table.items() if fnmatch(name, pattern)), None)
