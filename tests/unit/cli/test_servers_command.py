"""`sightline servers` for a run that has ended, and without a required address."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.cli.main import main
from sightline.run import EventLog, RunDir

RUN = """
[model]
path = "tiny"
[env]
name = "color_codeword"
[media]
root = "/data/media"
[inference]
servers = ["http://10.0.0.3:8000", "http://10.0.0.4:8000"]
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    new_run_dir = RunDir(tmp_path / "run-001")
    new_run_dir.make()
    new_run_dir.config.write_text(RUN)
    EventLog(new_run_dir.metrics, "launcher").write("end", outcome="finished", problem="", fix="")
    return new_run_dir


def test_action_without_an_address_lists_the_servers(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["servers", str(run_dir.path), "remove"]) == 2
    errors = capsys.readouterr().err
    assert "`remove` requires the URL of a server" in errors
    assert "The run has http://10.0.0.3:8000, http://10.0.0.4:8000" in errors


def test_ended_run_is_reported(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["servers", str(run_dir.path), "remove", "http://10.0.0.4:8000"]) == 0
    output = capsys.readouterr().out
    assert "the run is finished. When resumed, it starts with\n" in output
    assert output.endswith("http://10.0.0.3:8000  no report yet\n")
