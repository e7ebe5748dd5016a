"""Every process of a run finds a family that exists only on the Python path."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loop.conftest import SMALL
from loop.jobs import EXAMPLES, sightline, summary
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]
THIRD_FAMILY = Path(__file__).parents[1] / "contract" / "third_family"


def test_external_family_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = shutil.copytree(THIRD_FAMILY, tmp_path / "elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    completed = sightline("model", "tiny", "models/tiny", "--family", "pebble", cwd=tmp_path)
    assert completed.stdout.startswith("pebble: ")
    sightline("sft", EXAMPLES / "warmup.toml", "run.steps=20", cwd=tmp_path)
    sightline(
        "rl", "--plain", EXAMPLES / "cpu.toml", *SMALL, "run.steps=3", "rollout.max_tokens=6",
        cwd=tmp_path,
    )  # fmt: skip
    run_summary = summary(RunDir(tmp_path / "runs" / "job-001"))
    assert run_summary["steps"] == 3
    assert run_summary["mismatch_kl"] < 1e-6
