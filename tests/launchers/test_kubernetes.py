"""Manifests of Kubernetes: of its schemas, and their commands make a run when they are run as pods
would be, each with its own rights from the cluster's secrets and nobody who holds its input."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from loop.jobs import ledger, summary

from launchers.slurm_cluster import namespace
from launchers.small_run import build_environ, sightline, small_run
from sightline.run import RunDir
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(600)]
STEPS = 4
OPTIONS = """[launch.kubernetes]
image = "sightline:cpu"
volume_claim = "runs"
image_pull_secrets = ["registry"]
service_account = "training"
node_selector = {pool = "gpu"}
tolerations = [{key = "nvidia.com/gpu", operator = "Exists", tolerationSeconds = 60}]
"""


def test_commands_of_the_manifests_form_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "needs kubernetes-validate: make test-launchers"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=reason)
    for name, value in build_environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    pods: dict[str, subprocess.Popen[bytes]] = {}
    with namespace() as enter, small_run(tmp_path, enter, STEPS, OPTIONS) as file:
        words = ["rl", str(file), "--on", "kubernetes", "-o", "made"]
        sightline(enter, *words, cwd=tmp_path)
        manifests = list(yaml.safe_load_all((tmp_path / "made" / "sightline.yaml").read_text()))
        for manifest in manifests:
            kubernetes_validate.validate(manifest, "1.30", strict=True)
        lines = (tmp_path / "made" / "secrets.env").read_text().splitlines()
        secrets = dict(line.split("=", 1) for line in lines)
        jobs = {job["metadata"]["name"]: job for job in manifests if job["kind"] == "Job"}

        def start(name: str) -> None:
            with open(tmp_path / f"{name}.log", "ab") as log:
                command = [*enter, *find_command(jobs[name], file)]
                pods[name] = subprocess.Popen(
                    command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=os.environ | find_environ(jobs[name], secrets),
                )  # fmt: skip

        try:
            for name in jobs:
                start(name)
            run_dir = RunDir(tmp_path / "runs" / "job-001")
            deadline = time.monotonic() + 300
            while max(by_step(read_events(run_dir.metrics), "train"), default=0) < 1:
                log = (tmp_path / "job-launcher.log").read_text()
                assert pods["job-launcher"].poll() is None and time.monotonic() < deadline, log
                time.sleep(0.2)
            os.kill(pods["job-worker-0"].pid, signal.SIGKILL)
            pods["job-worker-0"].wait()
            start("job-worker-0")  # as restartPolicy says
            ended = {name: pod.wait(300) for name, pod in pods.items()}
        finally:
            for pod in pods.values():
                pod.kill()
        assert set(ended.values()) == {0}, ended
        assert [step for step, _ in ledger(run_dir)] == list(range(1, STEPS + 1))
        assert summary(run_dir)["mismatch_kl"] < 1e-6
        assert secrets["launcher"] not in (tmp_path / "made" / "sightline.yaml").read_text()


def find_environ(job: dict[str, Any], secrets: dict[str, str]) -> dict[str, str]:
    """The variables of a pod: values, and those from the cluster's secrets."""
    variables = job["spec"]["template"]["spec"]["containers"][0]["env"]
    return {
        variable["name"]: secrets[variable["valueFrom"]["secretKeyRef"]["key"]]
        if "valueFrom" in variable
        else variable["value"]
        for variable in variables
    }


def find_command(job: dict[str, Any], file: Path) -> list[str]:
    """The command of a pod, where this machine has the name of the service and the run file."""
    container = job["spec"]["template"]["spec"]["containers"][0]
    places = {"tcp://job:7000": "tcp://127.0.0.1:7000", "/etc/sightline/run.toml": str(file)}
    return [places.get(word, word) for word in container["command"]]
