"""What a process of a run shares with the launcher that started it."""

from __future__ import annotations

import json
from pathlib import Path

from sightline.run import RunDir

SECRET_VARIABLE = "SIGHTLINE_SECRET"
"""The variable in which the ranks of a trainer get what they know one another by."""


def get_error_file(run_dir: RunDir, name: str) -> Path:
    return run_dir.logs / f"{name}.error.json"


def write_error_file(run_dir: RunDir, name: str, problem: str, fix: str) -> None:
    """Called in a process that fails: the launcher quotes it."""
    get_error_file(run_dir, name).write_text(json.dumps({"problem": problem, "fix": fix}))
