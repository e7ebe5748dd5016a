"""Read `verdicts.jsonl`: the verdicts on the rollouts of each step."""

from __future__ import annotations

import json

from sightline.run.run_dir import RunDir
from sightline.wire.file import read_lines


def parse_verdicts(line: bytes) -> tuple[int, dict[str, str]] | None:
    """Return the step of a line and its verdicts by rollout; None if it is unreadable."""
    try:
        found = json.loads(line)
        verdicts = {name: v for v, names in found["verdicts"].items() for name in names}
        step = int(found["step"])
        return (step, verdicts) if 0 <= step < 2**63 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def read_verdicts(run_dir: RunDir, stem: str) -> dict[str, str]:
    """Return the verdicts of a step by rollout. The last line of a step counts."""
    parsed = [line for line in map(parse_verdicts, read_lines(run_dir.verdicts)) if line]
    return {f"step_{step:06d}": verdicts for step, verdicts in parsed}.get(stem, {})
