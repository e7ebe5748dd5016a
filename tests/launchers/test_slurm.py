"""A run as a Slurm job: it is submitted, preempted, requeued, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop.jobs import ledger, summary

from launchers.slurm_cluster import Slurm, slurm
from launchers.small_run import build_environ, sightline, small_run
from sightline.run import RunDir
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(600)]
STEPS = 5


def test_preempted_job_is_requeued_and_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in build_environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    own = '[launch.resources]\n"worker-*" = {slurm = "--exclude=n1"}\n'
    with (
        slurm(tmp_path / "slurm") as cluster,
        small_run(tmp_path, cluster.enter, STEPS, own) as file,
    ):
        completed = sightline(
            cluster.enter, "rl", str(file), "--on", "slurm", cwd=tmp_path,
            SLURM_CONF=cluster.environ["SLURM_CONF"],
        )  # fmt: skip
        job = completed.partition("job: ")[2].split()[0]
        log = tmp_path / "runs" / f"slurm-{job}.log"
        wait_for_step(cluster, job, tmp_path, log, 2)
        cluster.call("scancel", "--signal=USR1", "--batch", job)
        cluster.wait(job, ("PENDING",), log)
        # Slurm delays a requeued job by two minutes. A node refuses credentials of the
        # second in which it ended the job, and earlier ones. A job started then would fail.
        cluster.wait_for_steps()
        cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        cluster.wait(job, ("COMPLETED",), log)
        assert [path.name for path in (tmp_path / "runs").glob("job-*")] == ["job-001"]
        run_dir = RunDir(tmp_path / "runs" / "job-001")
        assert [step for step, _ in ledger(run_dir)] == list(range(1, STEPS + 1)), log.read_text()
        run_summary = summary(run_dir)
        assert run_summary["bad_media"] == 0 and run_summary["mismatch_kl"] < 1e-6
        assert not list((tmp_path / "scratch").rglob("config.toml"))


def wait_for_step(cluster: Slurm, job: str, folder: Path, log: Path, step: int) -> None:
    run_dir = RunDir(folder / "runs" / "job-001")

    while max(by_step(read_events(run_dir.metrics), "train"), default=0) < step:
        cluster.wait(job, ("PENDING", "RUNNING"), log)
