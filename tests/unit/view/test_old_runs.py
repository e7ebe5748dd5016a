"""Run directories of earlier versions, whose config.toml has the old names, can still be viewed.

The files in tests/golden/old_runs were written by the version before the names changed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from synthetic_run import SyntheticSize, write_synthetic_run

import sightline
from sightline import config
from sightline.cli.config import detect_file_kind
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

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "old_runs"
SIZE = SyntheticSize(steps=2, rollouts_per_step=20, images=4, conversations=6)


@pytest.fixture
def old_run(tmp_path: Path, tiny_model: Path) -> RunDir:
    run_dir = write_synthetic_run(tmp_path / "old-001", SIZE)
    text = (GOLDEN / "rl.toml").read_text().replace("models/warm", str(tiny_model))
    run_dir.config.write_text(text)
    return run_dir


@pytest.mark.parametrize("name", ["rl", "sft"])
def test_stored_settings_with_old_names_are_read(name: str) -> None:
    path = GOLDEN / f"{name}.toml"
    values = tomllib.loads(path.read_text())
    old = [key for key in RENAMED if key.partition(".")[2] in values.get(key.partition(".")[0], {})]
    assert len(old) >= 15
    found = config.load_stored_config(detect_file_kind(path), path)
    assert found.trainer.max_grad_norm == values["trainer"]["grad_norm"]


def test_dashboard_and_notebook_show_current_names(old_run: RunDir) -> None:
    with TestClient(build_app(RunCollection([old_run.path])), base_url="http://localhost") as web:
        shown = web.get("/api/settings?run=old-001").json()
        assert web.get("/api/runs").json()[0]["env"] == "color_codeword"
    assert "[monitor]" in shown["text"] and "monitor" not in shown["settings"]
    assert shown["settings"]["logging"]["sinks"] == ["tensorboard"]
    assert shown["settings"]["trainer"]["max_grad_norm"] == 0.25
    run = sightline.open_run(old_run.path)
    assert run.settings == shown["settings"] and len(run.rollouts) == 40
    assert "color" not in "".join(run.problems)


def test_old_run_can_be_reported_exported_and_inspected(
    old_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "[monitor]" in write_report(old_run).read_text()
    assert len(list(export_samples(old_run))) == 2
    assert inspect_run(old_run).rollouts == 40
    assert main(["trace", "export", str(old_run.traces_of(1))]) == 0
    assert capsys.readouterr().out.count("\n") >= 20


def test_old_and_new_runs_compare_by_the_same_names(old_run: RunDir, tmp_path: Path) -> None:
    new = RunDir(tmp_path / "new-001")
    new.make()
    stored = config.load_stored_config(config.RunFile, old_run.config)
    new.config.write_text(config.dump_toml(stored))
    differing = {row.label for row in compare_runs(old_run, new).settings}
    assert not {label for label in differing if label in {*RENAMED, *RENAMED.values()}}


def test_settings_outside_a_section_do_not_stop_a_reader(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.config.write_text("trainer = 3\n[monitor]\nsinks = []\n[logging]\nsinks = []\n")
    assert RunFiles(run_dir).settings["trainer"] == 3
    run_dir.config.write_text("logging = 3\n[monitor]\nsinks = []\n")
    assert RunFiles(run_dir).settings["logging"] == 3
    view = RunView("odd", run_dir)
    assert view.overview()["env"] == ""
    view.close()
