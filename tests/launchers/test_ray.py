"""A run on Ray continues after the node with its server and worker is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from loop.jobs import Job, ledger, summary

from launchers.slurm_cluster import namespace
from launchers.small_run import build_environ, small_run

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(2400)]
STEPS = 8
# For a busy machine. No process is started before it is needed.
PATIENT = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_gcs_rpc_server_connect_timeout_s": "300",
    "RAY_py_gcs_connect_timeout_s": "300",
    "RAY_enable_worker_prestart": "false",
}
RESOURCES = """
[launch.resources]
trainer = {cpus = 2, memory_gb = 2}
"""


def test_ray_run_survives_loss_of_server_and_worker_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs Ray: make test-launchers")
    for name, value in (build_environ(tmp_path) | PATIENT).items():
        monkeypatch.setenv(name, value)
    with (
        namespace() as enter,
        small_run(tmp_path, enter, STEPS, RESOURCES) as file,
        cluster(enter, tmp_path) as nodes,
    ):
        nodes.tell("add 2")
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        job = Job(tmp_path, str(file), "--on", "ray", within=enter)
        job.wait_for_step(1, 900)
        nodes.tell("kill")
        nodes.tell("add 2")
        output = job.output(900)
        assert job.process.returncode == 0, output
        assert [step for step, _ in ledger(job.run_dir)] == list(range(1, STEPS + 1))
        run_summary = summary(job.run_dir)
        assert run_summary["bad_media"] == 0 and run_summary["mismatch_kl"] < 1e-6
        events = job.run_dir.metrics.read_text()
        assert "was lost with its node" in (job.run_dir.logs / "server.log").read_text()
        assert "restarting it" in events and '"reason":"crash' in events.replace(" ", "")
        assert not list((tmp_path / "scratch").rglob("config.toml"))


class Nodes:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self._read()

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        print(words, file=self.process.stdin, flush=True)
        assert self._read() == words.split()[0]

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def cluster(enter: Sequence[str], folder: Path) -> Iterator[Nodes]:
    script = Path(__file__).with_name("ray_cluster.py")
    with open(folder / "ray.log", "w") as log:
        process = subprocess.Popen(
            [*enter, sys.executable, str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        yield Nodes(process)
    finally:
        process.communicate(timeout=60)
