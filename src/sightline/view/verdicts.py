"""What was made of each rollout of a step."""

from __future__ import annotations

import json

from sightline.run.run_dir import RunDir
from sightline.wire.file import read_lines


def read_verdicts(run_dir: RunDir, stem: str) -> dict[str, str]:
    """The verdict of each rollout of a step; of several lines for one step the last one counts."""
    found: dict[str, str] = {}
    for line in read_lines(run_dir.verdicts):
        try:
            step = json.loads(line)
            if f"step_{step['step']:06d}" == stem:
                found = {name: v for v, names in step["verdicts"].items() for name in names}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found
