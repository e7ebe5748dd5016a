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

from jinja2 import Environment, PackageLoader, StrictUndefined

from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.launch.claim import SECRET_VARIABLE
from sightline.launch.process_spec import Resources
from sightline.launch.run_plan import Endpoints, list_names, plan_run
from sightline.run.rights import derive_rights

HUB_PORT = 7000
HOME = "/sightline"
"""The volume's mount point, which is also the launcher's working directory."""
RUN_FILE = "/etc/sightline/run.toml"
LAUNCHER = "launcher"
RESTARTS = 20


def build_secrets(file: RunFile) -> str:
    """Return lines for `kubectl create secret --from-env-file`: each process's rights, and the
    run's secret for the launcher."""
    secret = secrets.token_hex(32)
    names = filter(file.launch.is_elsewhere, list_names(file))
    rights = {name: derive_rights(secret, name).encode() for name in names}
    return "".join(f"{name}={line}\n" for name, line in ({LAUNCHER: secret} | rights).items())


def build_kubernetes(file: RunFile, text: str, overrides: Sequence[str]) -> str:
    """Return the manifests for a run whose run file contains `text`."""
    if file.launch.kubernetes is None:
        raise ConfigError(
            "the run file has no [launch.kubernetes]",
            "set image (which docker/Dockerfile builds) and volume_claim (for the run directory) "
            "there",
        )
    name, port = make_name(file.run.name), file.launch.port or HUB_PORT
    command = [file.launch.python, "-m", "sightline", "rl", "--plain", RUN_FILE, *overrides]
    command += [f"rollout.workers={file.rollout.workers}", f"launch.port={port}", "--job", name]
    specs = plan_run(file, Path(), name, Endpoints(f"tcp://{name}:{port}"))
    placed = [(s.name, s.command, s) for s in specs if file.launch.is_elsewhere(s.name)]
    jobs = [
        {"name": n, "command": c, "limits": _list_limits(s.resources), "variables": s.variables}
        for n, c, s in [(LAUNCHER, command, specs[-1]), *placed]
    ]
    environment = Environment(
        loader=PackageLoader("sightline.launch"), undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("kubernetes.yaml.jinja").render(
        name=name,
        settings=file.launch.kubernetes,
        port=port,
        run_file=text,
        jobs=jobs,
        launcher=LAUNCHER,
        home=HOME,
        scratch=file.launch.scratch,
        restarts=RESTARTS,
        secret_variable=SECRET_VARIABLE,
    )


def _list_limits(resources: Resources) -> dict[str, str]:
    limits = {"cpu": str(resources.cpus)}
    if resources.memory_gb:
        limits["memory"] = f"{ceil(resources.memory_gb * 1000)}M"
    if resources.gpus:
        limits["nvidia.com/gpu"] = str(ceil(resources.gpus))
    return limits


def make_name(name: str) -> str:
    """Return a valid name for a Kubernetes Service, which starts with a letter."""
    cut = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return cut if cut[:1].isalpha() else f"run-{cut}".strip("-")
