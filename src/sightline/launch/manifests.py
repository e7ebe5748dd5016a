"""Kubernetes manifests for a run: a Job for each process, and a Service for the orchestrator.

The manifests refer to one Kubernetes Secret, which is created from `secrets.env`. Each process gets
only its own rights from it. The launcher gets the run's secret.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.launch.claim import SECRET_VARIABLE
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.run_plan import Endpoints, list_names, plan_run
from sightline.run.rights import derive_rights

HUB_PORT = 7000
HOME = "/sightline"
"""The volume's mount point, which is also the launcher's working directory."""
RUN_FILE = "/etc/sightline/run.toml"
LAUNCHER = "launcher"
RESTARTS = 20

Table = dict[str, Any]


def get_port(file: RunFile) -> int:
    return file.launch.port or HUB_PORT


def build_secrets(file: RunFile) -> str:
    """Return lines for `kubectl create secret --from-env-file`: each process's rights, and the
    run's secret for the launcher."""
    secret = secrets.token_hex(32)
    names = filter(file.launch.is_elsewhere, list_names(file))
    rights = {name: derive_rights(secret, name).encode() for name in names}
    return "".join(f"{name}={line}\n" for name, line in ({LAUNCHER: secret} | rights).items())


def build_kubernetes(file: RunFile, text: str, overrides: Sequence[str]) -> list[Table]:
    """Return the manifests for a run whose run file contains `text`."""
    settings = file.launch.kubernetes
    required = {"image", "volume_claim"}
    if not (required <= settings.keys() <= required | {"namespace", "node_selector", "env_from"}):
        raise ConfigError(
            f"[launch.kubernetes] has the keys {', '.join(settings) or 'none'}",
            "set image (which docker/Dockerfile builds) and volume_claim (for the run directory); "
            "namespace, node_selector and env_from are optional",
        )
    name = make_name(file.run.name)
    specs = plan_run(file, Path(), name, Endpoints(f"tcp://{name}:{get_port(file)}"))
    run = {"name": "run", "configMap": {"name": f"{name}-run"}}
    home = {"name": "home", "persistentVolumeClaim": {"claimName": settings["volume_claim"]}}
    command = [file.launch.python, "-m", "sightline", "rl", "--plain", RUN_FILE, *overrides]
    command += [f"rollout.workers={file.rollout.workers}", f"launch.port={get_port(file)}"]
    launcher = ProcessSpec(LAUNCHER, [], 1, resources=specs[-1].resources)
    mounts = [{"name": "run", "mountPath": "/etc/sightline"}, {"name": "home", "mountPath": HOME}]
    # Volumes for a process's copy of the run and for shared memory.
    shm: Table = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    scratch_volumes: list[Table] = [{"name": "scratch", "emptyDir": {}}, shm]
    scratch_mounts = [
        {"name": "scratch", "mountPath": file.launch.scratch},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    service = {
        "clusterIP": "None",
        "selector": {"sightline/run": name, "sightline/process": LAUNCHER},
        "ports": [{"name": "hub", "port": get_port(file)}],
    }
    return [
        _build_object(file, "v1", "ConfigMap", f"{name}-run") | {"data": {"run.toml": text}},
        _build_object(file, "v1", "Service", name) | {"spec": service},
        _build_job(file, launcher, [*command, "--job", name], 0, [run, home], mounts),
        *(
            _build_job(file, spec, spec.command, RESTARTS, scratch_volumes, scratch_mounts)
            for spec in specs
            if file.launch.is_elsewhere(spec.name)
        ),
    ]


def _build_object(file: RunFile, version: str, kind: str, name: str, process: str = "") -> Table:
    labels = {"sightline/run": make_name(file.run.name)}
    labels |= {"sightline/process": process} if process else {}
    namespace = file.launch.kubernetes.get("namespace")
    place = {"namespace": namespace} if namespace else {}
    metadata = {"name": name, **place, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _build_job(
    file: RunFile,
    spec: ProcessSpec,
    command: Sequence[str],
    restarts: int,
    volumes: list[Table],
    mounts: list[Table],
) -> Table:
    settings, name, resources = file.launch.kubernetes, make_name(file.run.name), spec.resources
    limits: Table = {"cpu": str(resources.cpus)}
    if resources.memory_gb:
        limits["memory"] = f"{ceil(resources.memory_gb * 1000)}M"
    if resources.gpus:
        limits["nvidia.com/gpu"] = str(ceil(resources.gpus))
    source = {"secretKeyRef": {"name": f"{name}-secret", "key": spec.name}}
    container: Table = {
        "name": "sightline",
        "image": settings["image"],
        "command": list(command),
        "env": [{"name": SECRET_VARIABLE, "valueFrom": source}],
        "resources": {"requests": limits, "limits": limits},
        "volumeMounts": mounts,
    }
    if spec.name == LAUNCHER:
        container |= {"workingDir": HOME, "ports": [{"containerPort": get_port(file)}]}
    if settings.get("env_from"):
        container["envFrom"] = [{"secretRef": {"name": settings["env_from"]}}]
    pod: Table = {
        "restartPolicy": "OnFailure" if restarts else "Never",
        "containers": [container],
        "volumes": volumes,
    }
    if settings.get("node_selector"):
        pod["nodeSelector"] = settings["node_selector"]
    job = _build_object(file, "batch/v1", "Job", f"{name}-{spec.name}", spec.name)
    template = {"metadata": {"labels": job["metadata"]["labels"]}, "spec": pod}
    return job | {"spec": {"backoffLimit": restarts, "template": template}}


def make_name(name: str) -> str:
    """Return a valid name for a Kubernetes Service, which starts with a letter."""
    cut = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return cut if cut[:1].isalpha() else f"run-{cut}".strip("-")
