"""Several runs of one file, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.jobs import EXAMPLES, sightline
from sightline.run import RunDir
from sightline.view.run_status import get_status

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]


def test_failed_sweep_run_is_reported_and_the_others_continue(
    tiny_model: Path, tmp_path: Path
) -> None:
    file, values = EXAMPLES / "warmup.toml", f"model.path=gone,{tiny_model}"
    words = ("run.name=job", "run.steps=2", "sft.output_dir=out", "run.seed=3")
    done = sightline("sft", file, *words, values, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "gone" in done.stderr and "  fix: " in done.stderr
    (finished,) = (tmp_path / "runs").glob("job-*")
    varied = f"path{tiny_model}".replace("/", "")
    assert finished.name == f"job-{varied}-001" and get_status(RunDir(finished)).state == "finished"
    assert (tmp_path / f"out-{varied}" / "model.safetensors").is_file()
    assert " finished " in done.stdout and " 2/2 " in done.stdout
    refused = sightline("sft", file, "run.steps=2,none", cwd=tmp_path, check=False)
    assert refused.returncode == 2 and "[run] steps" in refused.stderr
    assert not refused.stdout, "a value that is refused ends the sweep before it begins"
