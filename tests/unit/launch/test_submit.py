"""The launcher as a cluster's job: after a restart it resumes the run that it started."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from sightline.config import RunFile, load_config
from sightline.errors import ConfigError, ResumeRefused
from sightline.launch.checks.table import Report
from sightline.launch.jobs import RlJob
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.run_plan import LEADER
from sightline.launch.submit import run_job
from sightline.run import RunDir

RUN = """
[run]
name = "job"
dir = "{folder}/runs"
steps = 3
[model]
path = "{folder}/model"
[env]
name = "vowels:Vowels"
"""


class ShortJob(RlJob):
    """A run of one process, which ends at once."""

    def check(self, file: RunFile, run_dir: RunDir, report: Report = lambda *finding: None) -> None:
        pass

    def build_specs(self, file: RunFile, run_dir: RunDir) -> list[ProcessSpec]:
        return [ProcessSpec(LEADER, [], 1, python="true")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    return tmp_path / "run.toml"


class PlannedJob(ShortJob):
    """A run on a GPU, whose memory is divided."""

    def resolve(self, file: RunFile) -> RunFile:
        planned = {"micro_batch_tokens": file.trainer.micro_batch_tokens or 2048}
        trainer = file.trainer.model_copy(update=planned)
        return super().resolve(file.model_copy(update={"trainer": trainer}))


class RefusedJob(ShortJob):
    """A run for which the cluster has no room."""

    def reserve(
        self, file: RunFile, run_dir: RunDir, specs: list[ProcessSpec]
    ) -> AbstractContextManager[None]:
        raise ConfigError("no room", "add nodes")


def run(file: Path, *overrides: str, key: str = "7") -> None:
    run_job(ShortJob(plain=True, is_job=True), file, overrides, key, None)


def list_runs(file: Path) -> list[str]:
    return sorted(path.name for path in (file.parent / "runs").glob("*-*"))


def test_job_ended_before_recording_its_run_starts_over(file: Path) -> None:
    unhashable = file.parent / "model" / "model.safetensors"
    unhashable.symlink_to("/proc/self/mem")  # reading it raises an error that is not ours
    with pytest.raises(OSError, match="Input/output error"):
        run(file)
    assert (
        list_runs(file) == ["job-001"] and not (file.parent / "runs/job-001/config.toml").exists()
    )
    unhashable.unlink()
    run(file)
    run(file)
    assert list_runs(file) == ["job-001", "job-002"]


def test_second_run_in_one_allocation_is_separate(file: Path) -> None:
    run(file)
    run(file, "run.name=other")
    run(file, key="8")
    assert list_runs(file) == ["job-001", "job-002", "other-001"]


def test_resumed_run_applies_or_refuses_changed_settings(file: Path) -> None:
    run(file)
    run(file, "run.steps=5")
    assert load_config(RunFile, file.parent / "runs/job-001/config.toml").run.steps == 5
    with pytest.raises(ResumeRefused, match=r"\[run\] seed was 0 and is now 4"):
        run(file, "run.steps=5", "run.seed=4")
    assert list_runs(file) == ["job-001"]


def test_resumed_run_keeps_its_planned_micro_batches(file: Path) -> None:
    for _ in range(2):
        run_job(PlannedJob(plain=True, is_job=True), file, [], "7", None)
    run(file)  # on another machine, which plans nothing
    assert list_runs(file) == ["job-001"]
    recorded = load_config(RunFile, file.parent / "runs/job-001/config.toml")
    assert recorded.trainer.micro_batch_tokens == 2048
    with pytest.raises(ResumeRefused, match="micro_batch_tokens was 2048 and is now 1024"):
        run(file, "trainer.micro_batch_tokens=1024")


def test_run_refused_before_start_leaves_no_files(file: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="no room"):
            run_job(RefusedJob(plain=True, is_job=True), file, [], "7", None)
        assert list_runs(file) == []
    run(file)
    assert list_runs(file) == ["job-001"]
