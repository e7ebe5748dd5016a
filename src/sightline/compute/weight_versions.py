"""What a version of the weights means: its bits, once and for all, or a new epoch."""

from __future__ import annotations

import json
from pathlib import Path

from sightline.wire.file import append_line, read_lines

HISTORY = "history.jsonl"


def record_epoch(root: Path, version: int, sha256: str) -> int:
    """The epoch of `version` with these bits. The history outlasts the folders, which go when no
    engine can need them: a version that is made again is compared with what it was."""
    history = root / HISTORY
    lines = [json.loads(line) for line in read_lines(history)]
    known = [line["sha256"] for line in lines if line["version"] == version]
    if sha256 in known:
        return known.index(sha256)
    root.mkdir(parents=True, exist_ok=True)
    line = {"version": version, "epoch": len(known), "sha256": sha256}
    append_line(history, json.dumps(line).encode())
    return len(known)


def get_version_folder(root: Path, version: int, epoch: int) -> Path:
    return root / (f"v{version:06d}" + (f".{epoch}" if epoch else ""))
