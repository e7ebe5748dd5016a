"""`sightline servers` of a run that has ended, and without the address that it needs."""

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
    made = RunDir(tmp_path / "run-001")
    made.make()
    made.config.write_text(RUN)
    EventLog(made.metrics, "launcher").write("end", outcome="finished", problem="", fix="")
    return made


def test_action_without_an_address_lists_the_servers(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["servers", str(run_dir.path), "remove"]) == 2
    said = capsys.readouterr().err
    assert "`remove` requires the URL of a server" in said
    assert "the run has http://10.0.0.3:8000, http://10.0.0.4:8000" in said


def test_ended_run_is_reported(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["servers", str(run_dir.path), "remove", "http://10.0.0.4:8000"]) == 0
    said = capsys.readouterr().out
    assert "the run is finished; when resumed, it starts with\n" in said
    assert said.endswith("http://10.0.0.3:8000  no report yet\n")
