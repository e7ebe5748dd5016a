"""The process that runs the generic family's trials gets no secrets of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sightline.families.anyvlm import _try_in_process

PYTHON = """#!/bin/sh
printf '\\n\\n{"problem": "%s"}' "$(env | cut -d= -f1 | tr '\\n' ' ')"
"""


def test_trials_inherit_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    names = _try_in_process(tmp_path).problem.split()
    assert {"PATH", "OMP_NUM_THREADS", "PYTHONPATH"} <= set(names)
    assert "WANDB_API_KEY" not in names
