"""The sections `[inference]` and `[launch]` of a run file: the engine with its servers, and the
machines on which a run's processes start."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from sightline.config.secret_refs import InvalidSetting, resolve_secret
from sightline.config.section import ConfigSection, Device, Keywords, Mutable, SecretRef
from sightline.errors import ConfigError

BESIDE_LAUNCHER = ("orchestrator", "evaluator")


class InferenceConfig(ConfigSection):
    engine: str = "torch"
    """Inference engine: torch (embedded), vllm, or one from an installed package."""
    servers: Mutable[tuple[str, ...]] = ()
    """URLs of running servers that can read the run's files. Without any, the run starts its
    own."""
    token: Mutable[SecretRef] = ""
    """Reference to the token of `servers`: env:NAME or file:PATH. A server that the run starts gets
    its own token."""
    control_token: Mutable[SecretRef] = ""
    """Reference to the token that allows leasing `servers` and updating their weights. Empty uses
    `token`."""
    outage_timeout_s: Mutable[float] = Field(600.0, gt=0)
    """Seconds without any ready server after which the run ends."""
    python: Mutable[str] = ""
    """Python interpreter of the server, with vLLM and Sightline installed. Empty uses the run's
    own."""
    tensor_parallel_size: Mutable[int] = Field(1, ge=1)
    """Number of devices that share each matrix in a vLLM that the run starts."""
    data_parallel_size: Mutable[int] = Field(1, ge=1)
    """Number of model copies that share the requests in a vLLM that the run starts."""
    gpu_memory_utilization: Mutable[float | None] = Field(None, ge=0, le=1)
    """Fraction of the GPU's memory for weights and KV cache of a server that the run starts. If
    unset, it is planned if the trainer uses the same GPU (docs/memory.md), and 0.9 otherwise. 0
    means 0.9, or 0.3 for all servers together if the trainer uses the same GPU."""
    engine_args: Mutable[Keywords] = {}
    """More options for an engine that the run starts. For vLLM these are its command-line options
    without the leading dashes, such as `enable_expert_parallel = true`."""
    host: Mutable[str] = "127.0.0.1"
    """Address that the server binds to."""
    tls_cert: Mutable[str] = ""
    """PEM file of the TLS certificate for a server that the run starts, on the server's machine.
    Its URL is then https."""
    tls_key: Mutable[str] = ""
    """PEM file of the private key of `tls_cert`."""
    port: Mutable[int] = Field(0, ge=0, le=65535)
    """Port of the server. 0 chooses a free one."""
    device: Device = "auto"
    """Device of the server: cpu, cuda or auto."""
    threads: Mutable[int] = Field(0, ge=0)
    """Number of compute threads of the server. 0 shares the cores with the trainer."""
    max_num_seqs: Mutable[int] = Field(256, ge=1)
    """Maximum number of sequences in flight, including those whose KV cache is kept for their next
    turn."""
    max_model_len: Mutable[int] = Field(2048, ge=2)
    """Maximum number of tokens per sequence, prompt and answer together."""
    prefill_chunk_tokens: Mutable[int] = Field(512, ge=1)
    """Maximum number of prompt tokens per sequence that one prefill step computes."""
    pixel_cache_mb: Mutable[int] = Field(256, ge=0)
    """Memory in MB for image patches, in either engine. 0 turns the cache off."""
    feature_cache_mb: Mutable[int] = Field(256, ge=0)
    """Memory in MB on the server's device for image features."""
    pixel_threads: Mutable[int] = Field(0, ge=0)
    """Number of threads that decode images. 0 chooses by CPU cores."""
    keep_kv_over_updates: bool = False
    """Whether sequences keep their KV cache when weights change. Their later tokens then also
    depend on the old weights. If false, sequences are prefilled again."""

    @model_validator(mode="after")
    def _check_servers(self) -> InferenceConfig:
        for address in self.servers:
            if not address.startswith(("http://", "https://")):
                host = address if "://" not in address and "@" not in address else "HOST:PORT"
                raise InvalidSetting("servers has a URL without http://", f"write http://{host}")
            if "@" in urlsplit(address).netloc:
                raise InvalidSetting(
                    "servers has a URL with a password",
                    "remove it, and set [inference] token to env:NAME or file:PATH",
                )
        if len(set(self.servers)) < len(self.servers):
            raise InvalidSetting("servers lists a server twice", "list each server once")
        return self

    @property
    def scheme(self) -> str:
        """The URL scheme of servers that the run starts."""
        return "https" if self.tls_cert else "http"

    def read_token(self, for_control: bool = False) -> str:
        """Return the token of servers that the run did not start; `for_control`, the one that lets
        it update their weights."""
        name = "control_token" if for_control and self.control_token else "token"
        return resolve_secret(getattr(self, name), f"[inference] {name}")


class ResourceRequest(ConfigSection):
    """Resources that a process requests from a cluster. Unset ones follow from other settings."""

    cpus: int | None = Field(None, ge=0)
    gpus: float | None = Field(None, ge=0)
    memory_gb: float = Field(0.0, ge=0)
    slurm: str = ""


class PodSettings(ConfigSection):
    """Values for the Kubernetes manifests, the same for every pod."""

    image: str
    volume_claim: str
    namespace: str = ""
    node_selector: dict[str, str] = {}
    env_from: str = ""
    tolerations: list[dict[str, str | int]] = []
    image_pull_secrets: list[str] = []
    service_account: str = ""


class LaunchConfig(ConfigSection):
    on: Mutable[Literal["local", "ray", "slurm", "kubernetes"]] = "local"
    """Location of the trainer, servers and workers: on this machine (and `hosts`), on a Ray
    cluster, in a Slurm job, or in Kubernetes pods, which Kubernetes itself starts."""
    num_servers: Mutable[int] = Field(1, ge=1)
    """Number of inference servers that the run starts. More than one requires other machines."""
    resources: Mutable[dict[str, ResourceRequest]] = {}
    """Resources that a process requests from a cluster, by patterns of process names (trainer,
    server*, worker-*; on Slurm and Kubernetes also orchestrator, for the launcher's job). Each is a
    table with cpus, gpus, memory_gb (10^9 bytes) and slurm, the options of its own component."""
    slurm: Mutable[Keywords] = {}
    """sbatch options of the job, by their long names: partition, account, time."""
    kubernetes: Mutable[PodSettings | None] = None
    """Values for the manifests: image (which docker/Dockerfile builds) and volume_claim (for the
    run directory), and optionally namespace, node_selector, env_from, tolerations (in the form of
    Kubernetes), image_pull_secrets (names of Secrets) and service_account."""
    hosts: Mutable[Keywords] = {}
    """Processes that run on other machines, by patterns of their names (trainer, worker-*,
    server*). Each value is the command prefix that runs a command there, such as "ssh gpu-1"."""
    address: Mutable[str] = "127.0.0.1"
    """Address of this machine at which other machines reach the orchestrator. On a cluster,
    127.0.0.1 stands for the address of this machine's network interface."""
    port: Mutable[int] = Field(0, ge=0, le=65535)
    """Port of the orchestrator at `address`. 0 chooses a free one."""
    python: Mutable[str] = "python3"
    """Python interpreter on other machines, with Sightline installed."""
    scratch: Mutable[str] = "/tmp"
    """Folder on other machines for a process's copy of the run's files."""
    restart: Mutable[int] = Field(0, ge=0)
    """How many times to restart a failed trainer from its last checkpoint. On
    Kubernetes, the manifests decide."""

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, hosts: Keywords) -> Keywords:
        for pattern, command in hosts.items():
            if not isinstance(command, str) or not command.split():
                raise InvalidSetting(
                    f"hosts: {pattern} = {command!r} is not a command",
                    'write the command prefix of that machine, such as "ssh gpu-1"',
                )
            for name in BESIDE_LAUNCHER:
                if fnmatch(name, pattern):
                    raise InvalidSetting(
                        f"hosts: {pattern} matches the {name}, which runs next to the launcher",
                        "use patterns of the other processes: trainer, server*, worker-*",
                    )
        return hosts

    def find_host(self, name: str) -> list[str]:
        """Return the process's command prefix from `hosts`, or an empty list."""
        return shlex.split(self._find(self.hosts, name) or "")

    def find_resources(self, name: str) -> ResourceRequest:
        """Return the resources that the process requests."""
        return self._find(self.resources, name) or ResourceRequest()

    def is_elsewhere(self, name: str) -> bool:
        """Return whether the process runs on a machine without the run directory."""
        is_placed = self.on != "local" or bool(self.find_host(name))
        return is_placed and name not in BESIDE_LAUNCHER

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise if a pattern matches none of these process names."""
        placed = [name for name in names if name not in BESIDE_LAUNCHER]
        # If the launcher itself is a job, the orchestrator's resources are those of the job.
        requesting = [*placed, *(["orchestrator"] if self.on in ("slurm", "kubernetes") else [])]
        resources = self.resources if self.on != "local" else {}
        for setting, table, known in (
            ("hosts", self.hosts, placed),
            ("resources", resources, requesting),
        ):
            for pattern in table:
                if not any(fnmatch(name, pattern) for name in known):
                    raise ConfigError(
                        f"[launch] {setting}: {pattern!r} matches no process of this run",
                        f"use a pattern for one of {', '.join(known)}",
                    )

    @property
    def has_other_machines(self) -> bool:
        return self.on != "local" or bool(self.hosts)

    def _find(self, table: Mapping[str, Any], name: str) -> Any:
        return next((value for pattern, value in table.items() if fnmatch(name, pattern)), None)
