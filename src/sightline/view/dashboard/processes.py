"""Describe a run's processes: their last activity, queues and logs."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from sightline.view.dashboard.run_view import RunView

LOG_BYTES = 65_536
"""Maximum bytes of a log in one answer."""
_QUEUES = ("groups_ahead", "in_flight", "waiting")


def describe_processes(run: RunView) -> dict[str, Any]:
    newest = run.history.newest("step")
    trained = run.history.newest("train")
    logs = {entry.name: entry for entry in _list_logs(run)}
    names = {n.removesuffix(".log") for n in logs if n.endswith(".log")}
    names |= set(run.history.last_seen)
    signs = {name: _last_activity(run, name, logs) for name in names}
    return {
        "now": time.time(),
        "state": run.state,
        "phase": run.history.phase,
        "processes": [
            {
                "name": name,
                "last": signs[name],
                "log_bytes": _find_size(logs.get(f"{name}.log")),
                "last_line": _read_last_line(logs.get(f"{name}.log")),
            }
            for name in sorted(names)
        ],
        "queues": {name: newest[name] for name in _QUEUES if name in newest},
        "seconds": _table(trained, "seconds."),
        "workers_lost": _table(newest, "workers_lost."),
        "dropped": dict(run.history.dropped),
        "notes": [
            {
                "time": note.time,
                "process": note.process,
                "kind": note.kind,
                "step": note.step,
                "text": _format_values(note.values),
            }
            for note in reversed(list(run.history.notes)[-100:])
        ],
    }


def _last_activity(run: RunView, name: str, logs: dict[str, os.DirEntry[str]]) -> float | None:
    """Return the time of a process's last event, heartbeat or log line."""
    signs = [run.history.last_seen.get(name)]
    for file in (run.run_dir.heartbeat(name).name, f"{name}.log"):
        with contextlib.suppress(OSError, KeyError):
            signs.append(logs[file].stat().st_mtime)
    return max((sign for sign in signs if sign is not None), default=None)


def _find_size(log: os.DirEntry[str] | None) -> int | None:
    try:
        return None if log is None else log.stat().st_size
    except OSError:  # it was just removed
        return None


def _table(row: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): v for name, v in row.items() if name.startswith(prefix)}


def _format_values(values: dict[str, Any]) -> str:
    texts = (f"{name} {value}" for name, value in values.items() if not isinstance(value, dict))
    return ", ".join(texts)[:600]


def _list_logs(run: RunView) -> list[os.DirEntry[str]]:
    """Return the regular files in the log folder, including heartbeats."""
    try:
        with os.scandir(run.run_dir.logs) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []


def find_log(run: RunView, name: str, before: int | None) -> dict[str, Any] | None:
    """Return up to LOG_BYTES of a log before byte `before`, or from the end of the file.

    The name is compared with existing files and never used as a path.
    """
    entry = next((entry for entry in _list_logs(run) if entry.name == f"{name}.log"), None)
    if entry is None:
        return None
    try:
        with open(entry.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if before is None else max(0, min(before, size))
            start = max(0, end - LOG_BYTES)
            file.seek(start)
            data = file.read(end - start)
    except OSError:  # it was just removed
        return None
    if start > 0 and b"\n" in data:
        # Start with a complete line.
        skipped = data.index(b"\n") + 1
        start, data = start + skipped, data[skipped:]
    return {
        "name": name, "size": size, "start": start, "end": end,
        "text": data.decode("utf-8", errors="replace"),
    }  # fmt: skip


def _read_last_line(file: os.DirEntry[str] | None) -> str:
    """Return the last non-empty line of a log, or an empty string."""
    if file is None:
        return ""
    try:
        with open(file.path, "rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(0, size - 2000))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
