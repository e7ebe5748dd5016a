"""A run as files for a cluster that starts processes by itself: manifests of Kubernetes, and a task
of SkyPilot.

    plan --> a Job for each process, a Service at which they find the orchestrator
         |--> a task of SkyPilot: node 0 has launcher and trainer, the others servers and workers

Each process is given its own rights from the cluster's secrets, the launcher the secret of the run;
the files name them, and `secrets.env` makes them.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.launch.claim import SECRET_VARIABLE
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.run_plan import TRAINER, Endpoints, list_names, plan_run
from sightline.run.rights import derive_rights

HUB_PORT = 7000
HOME = "/sightline"
"""Where pods of the launcher have the volume: relative paths of a run file begin there."""
RUN_FILE = "/etc/sightline/run.toml"
LAUNCHER = "launcher"
SECRETS_VARIABLE = "SIGHTLINE_SECRETS"
"""Gives a task of SkyPilot the lines of `secrets.env`, in base64."""
HEAD = "HEAD-OF-THE-CLUSTER"
RESTARTS = 20
KUBERNETES_KEYS = ("image", "namespace", "volume_claim", "node_selector", "env_from")
SETUP = "pip install 'sightline-rl[train,object-store]'"

Table = dict[str, Any]


def get_port(file: RunFile) -> int:
    return file.launch.port or HUB_PORT


def build_secrets(file: RunFile) -> str:
    """A line for each process with its rights in the run, and one with the secret for the launcher,
    as `kubectl create secret --from-env-file` reads them."""
    secret = secrets.token_hex(32)
    names = filter(file.launch.is_elsewhere, list_names(file))
    rights = {name: derive_rights(secret, name).encode() for name in names}
    return "".join(f"{name}={line}\n" for name, line in ({LAUNCHER: secret} | rights).items())


def build_kubernetes(file: RunFile, text: str, overrides: Sequence[str]) -> list[Table]:
    """The manifests of a run whose run file has `text`."""
    given = file.launch.kubernetes
    if unknown := given.keys() - set(KUBERNETES_KEYS):
        raise ConfigError(
            f"[launch.kubernetes] has {sorted(unknown)[0]}",
            f"it takes {', '.join(KUBERNETES_KEYS)}",
        )
    for key in ("image", "volume_claim"):
        if not given.get(key):
            raise ConfigError(
                f"[launch.kubernetes] has no {key}",
                "name the image that docker/Dockerfile builds, and the claim of a volume for "
                "the run directory",
            )
    name = make_name(file.run.name)
    specs = plan_run(file, Path(), name, Endpoints(f"tcp://{name}:{get_port(file)}"))
    run = {"name": "run", "configMap": {"name": f"{name}-run"}}
    home = {"name": "home", "persistentVolumeClaim": {"claimName": given["volume_claim"]}}
    command = [file.launch.python, "-m", "sightline", "rl", "--plain", RUN_FILE, *overrides]
    command += [f"rollout.workers={file.rollout.workers}", f"launch.port={get_port(file)}"]
    launcher = ProcessSpec(LAUNCHER, [], 1, resources=specs[-1].resources)
    mounts = [{"name": "run", "mountPath": "/etc/sightline"}, {"name": "home", "mountPath": HOME}]
    volumes: list[Table] = [run, home]
    return [
        _build_object(file, "v1", "ConfigMap", f"{name}-run") | {"data": {"run.toml": text}},
        _build_object(file, "v1", "Service", name)
        | {
            "spec": {
                "clusterIP": "None",
                "selector": {"sightline/run": name, "sightline/process": LAUNCHER},
                "ports": [{"name": "hub", "port": get_port(file)}],
            }
        },
        _build_job(file, launcher, [*command, "--job", name], 0, volumes, mounts),
        *(
            _build_job(file, spec, spec.command, RESTARTS, *_build_scratch(file))
            for spec in specs
            if file.launch.is_elsewhere(spec.name)
        ),
    ]


def _build_scratch(file: RunFile) -> tuple[list[Table], list[Table]]:
    """Volumes of a process that has its own copy of the run; its ranks share memory."""
    volumes: list[Table] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "scratch", "mountPath": file.launch.scratch},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return volumes, mounts


def _build_metadata(file: RunFile, name: str, process: str) -> Table:
    labels = {"sightline/run": make_name(file.run.name), "sightline/process": process}
    namespace = file.launch.kubernetes.get("namespace")
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "labels": labels if process else {"sightline/run": labels["sightline/run"]},
    }


def _build_object(file: RunFile, version: str, kind: str, name: str) -> Table:
    return {"apiVersion": version, "kind": kind, "metadata": _build_metadata(file, name, "")}


def _build_job(
    file: RunFile,
    spec: ProcessSpec,
    command: Sequence[str],
    restarts: int,
    volumes: list[Table],
    mounts: list[Table],
) -> Table:
    given, name = file.launch.kubernetes, make_name(file.run.name)
    asked = spec.resources
    limits: Table = {"cpu": str(asked.cpus)}
    if asked.memory_gb:
        limits["memory"] = f"{ceil(asked.memory_gb * 1000)}M"
    if asked.gpus:
        limits["nvidia.com/gpu"] = str(ceil(asked.gpus))
    source = {"secretKeyRef": {"name": f"{name}-secret", "key": spec.name}}
    container: Table = {
        "name": "sightline",
        "image": given["image"],
        "command": list(command),
        "env": [{"name": SECRET_VARIABLE, "valueFrom": source}],
        "resources": {"requests": limits, "limits": limits},
        "volumeMounts": mounts,
    }
    if spec.name == LAUNCHER:
        container |= {"workingDir": HOME, "ports": [{"containerPort": get_port(file)}]}
    if given.get("env_from"):
        container["envFrom"] = [{"secretRef": {"name": given["env_from"]}}]
    pod: Table = {
        "restartPolicy": "OnFailure" if restarts else "Never",
        "containers": [container],
        "volumes": volumes,
    }
    if given.get("node_selector"):
        pod["nodeSelector"] = given["node_selector"]
    metadata = _build_metadata(file, f"{name}-{spec.name}", spec.name)
    template = {"metadata": {"labels": metadata["labels"]}, "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"backoffLimit": restarts, "template": template},
    }


def make_name(name: str) -> str:
    """The name as Kubernetes takes it for a Service: a letter first, a letter or digit last."""
    cut = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return cut if cut[:1].isalpha() else f"run-{cut}".strip("-")


def build_skypilot(file: RunFile, path: str, overrides: Sequence[str]) -> Table:
    """The task of a run whose run file is at `path` in the working directory."""
    name, hub = make_name(file.run.name), f"tcp://{HEAD}:{get_port(file)}"
    nodes = _share_nodes(plan_run(file, Path(), name, Endpoints(hub)))
    command = [file.launch.python, "-m", "sightline", "rl", "--plain", path, *overrides]
    command += [f"rollout.workers={file.rollout.workers}", f"launch.port={get_port(file)}"]
    launcher = f"{_grant(LAUNCHER)} {shlex.join([*command, '--job', name])} < /dev/null"
    lines = [
        'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        f"export -n {SECRETS_VARIABLE}",
        f'rights() {{ echo "${SECRETS_VARIABLE}" | base64 -d | sed -n "s/^$1=//p"; }}',
        'case "$SKYPILOT_NODE_RANK" in',
    ]
    for rank, processes in enumerate(nodes):
        lines.append(f"{rank})")
        for spec in processes:
            words = shlex.join(spec.command).replace(HEAD, "$head")
            lines.append(f"  (until {_grant(spec.name)} {words} < /dev/null; do sleep 5; done) &")
        lines += [f"  {launcher} ;;" if rank == 0 else "  wait ;;"]
    lines.append("esac")
    return {
        "name": name,
        "num_nodes": len(nodes),
        "workdir": ".",
        "resources": _measure_node(file, nodes) | file.launch.skypilot,
        "secrets": {SECRETS_VARIABLE: None},
        "setup": SETUP,
        "run": "\n".join(lines) + "\n",
    }


def _share_nodes(specs: Sequence[ProcessSpec]) -> list[list[ProcessSpec]]:
    """The processes of each node of a task, the one with the launcher first."""
    nodes = [[spec for spec in specs if spec.name == TRAINER]]
    nodes += [[spec] for spec in specs if spec.name.startswith("server")]
    workers = [spec for spec in specs if spec.name.startswith("worker-")]
    others = nodes[1:] or nodes
    for number, worker in enumerate(workers):
        others[number % len(others)].append(worker)
    return nodes


def describe_nodes(file: RunFile, specs: Sequence[ProcessSpec]) -> str:
    """What SkyPilot is asked for in all: nodes are alike, and a node has GPUs that nobody uses."""
    nodes = _share_nodes(specs)
    used = sum(spec.resources.gpus for node in nodes for spec in node)
    gpus = len(nodes) * _count_accelerators(file.launch.skypilot.get("accelerators") or "none:0")
    return f"in all on skypilot: {len(nodes)} nodes, {gpus:g} GPU, of which {ceil(used)} are used"


def _count_accelerators(given: Any) -> float:
    """GPUs of a node, by the words of SkyPilot: NAME:COUNT, {NAME: COUNT}, or the least of some."""
    if isinstance(given, dict):
        given = [f"{name}:{count}" for name, count in given.items()]
    if isinstance(given, list):
        return min(map(_count_accelerators, given), default=0)
    count = str(given).partition(":")[2] or "1"
    return float(count) if re.fullmatch(r"[\d.]+", count) else 1


def _grant(name: str) -> str:
    """What gives the command behind it the rights of the process, and no others."""
    return f'{SECRET_VARIABLE}="$(rights {name})"'


def _measure_node(file: RunFile, nodes: Sequence[Sequence[ProcessSpec]]) -> Table:
    """What each node is asked for: all are alike."""
    gpus = max(sum(spec.resources.gpus for spec in node) for node in nodes)
    if gpus and "accelerators" not in file.launch.skypilot:
        raise ConfigError(
            f"a node of the run asks for {gpus:g} GPUs, and [launch.skypilot] has no accelerators",
            f'add accelerators = "H100:{ceil(gpus)}"',
        )
    if gpus and (given := _count_accelerators(file.launch.skypilot["accelerators"])) < gpus:
        raise ConfigError(
            f"a node of the run asks for {gpus:g} GPUs, and [launch.skypilot] accelerators have "
            f"{given:g}",
            f"write NAME:{ceil(gpus)}, or lower ranks or shards: each has a GPU of one node",
        )
    cpus = max(sum(spec.resources.cpus for spec in node) for node in nodes) + 1
    memory = max(sum(spec.resources.memory_gb for spec in node) for node in nodes)
    return {"cpus": f"{cpus}+", **({"memory": f"{ceil(memory)}+"} if memory else {})}
