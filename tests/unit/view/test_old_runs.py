"""Run directories of version 0.1.0, whose config.toml has the old names, can still be viewed."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest
import tiny_run
from fastapi.testclient import TestClient
from synthetic_run import SyntheticSize, write_synthetic_run

import sightline
from sightline import config
from sightline.cli.main import main
from sightline.config.renamed import RENAMED
from sightline.run import RunDir
from sightline.view.compare import compare_runs
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.run_view import RunView
from sightline.view.dashboard.server import build_app
from sightline.view.inspect import inspect_run
from sightline.view.parquet_export import export_samples
from sightline.view.report import write_report
from sightline.view.run_files import RunFiles

GOLDEN = tiny_run.GOLDEN / "0.1.0" / "config.toml"
SIZE = SyntheticSize(steps=2, rollouts_per_step=20, images=4, conversations=6)


@pytest.fixture
def old_run(tmp_path: Path, tiny_model: Path) -> RunDir:
    run_dir = write_synthetic_run(tmp_path / "old-001", SIZE)
    text = GOLDEN.read_text().replace('"checkpoint"', f'"{tiny_model}"')
    settings = text.partition("# sha256 ")[0]
    digest = hashlib.sha256(settings.encode()).hexdigest()
    run_dir.config.write_text(f"{settings}# sha256 {digest}\n")
    return run_dir


def test_stored_settings_with_old_names_are_read() -> None:
    values = tomllib.loads(GOLDEN.read_text())
    old = [key for key in RENAMED if key.partition(".")[2] in values.get(key.partition(".")[0], {})]
    assert old == list(RENAMED)
    loaded_config = config.load_config(config.RunFile, GOLDEN)
    assert loaded_config.algorithm.aggregation == values["trainer"]["loss_aggregation"]


def test_dashboard_and_notebook_show_current_names(old_run: RunDir) -> None:
    with TestClient(build_app(RunCollection([old_run.path])), base_url="http://localhost") as web:
        body = web.get("/api/settings?run=old-001").json()
        assert web.get("/api/runs").json()[0]["env"] == "color_codeword"
    assert "loss_aggregation" in body["text"]
    assert "loss_aggregation" not in body["settings"]["trainer"]
    assert body["settings"]["algorithm"]["aggregation"] == "tokens"
    run = sightline.open_run(old_run.path)
    assert run.settings == body["settings"] and len(run.rollouts) == 40
    assert "color" not in "".join(run.problems)


def test_old_run_can_be_reported_exported_and_inspected(
    old_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "loss_aggregation" in write_report(old_run).read_text()
    assert len(list(export_samples(old_run))) == 2
    assert inspect_run(old_run).rollouts == 40
    assert main(["trace", "export", str(old_run.traces_of(1))]) == 0
    assert capsys.readouterr().out.count("\n") >= 20


def test_old_and_new_runs_compare_by_the_same_names(old_run: RunDir, tmp_path: Path) -> None:
    new = RunDir(tmp_path / "new-001")
    new.make()
    stored = config.load_config(config.RunFile, old_run.config)
    new.config.write_text(config.dump_toml(stored))
    differing = {row.label for row in compare_runs([old_run], [new]).settings}
    assert not {label for label in differing if label in {*RENAMED, *RENAMED.values()}}


def test_settings_outside_a_section_do_not_stop_a_reader(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.config.write_text("trainer = 3\n[algorithm]\n")
    assert RunFiles(run_dir).settings["trainer"] == 3
    run_dir.config.write_text('algorithm = 3\n[trainer]\nloss = "ppo"\n')
    assert RunFiles(run_dir).settings["algorithm"] == 3
    view = RunView("odd", run_dir)
    assert view.overview()["env"] == ""
    view.close()
