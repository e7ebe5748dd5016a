"""`verdicts.jsonl`: what was made of each rollout of a step."""

from __future__ import annotations

import json

from sightline.run.run_dir import RunDir
from sightline.wire.file import read_lines


def parse_verdicts(line: bytes) -> tuple[int, dict[str, str]] | None:
    """The step of a line and its verdicts by rollout; None for a line that cannot be read."""
    try:
        found = json.loads(line)
        verdicts = {name: v for v, names in found["verdicts"].items() for name in names}
        step = int(found["step"])
        return (step, verdicts) if 0 <= step < 2**63 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def read_verdicts(run_dir: RunDir, stem: str) -> dict[str, str]:
    """The verdict of each rollout of a step; of several lines for one step the last one counts."""
    parsed = [line for line in map(parse_verdicts, read_lines(run_dir.verdicts)) if line]
    return {f"step_{step:06d}": verdicts for step, verdicts in parsed}.get(stem, {})
