"""Describe a run's processes: their last activity, queues and logs."""

from __future__ import annotations

import os
import time
from typing import Any

from sightline.regular_file import open_file
from sightline.view.dashboard.run_view import RunView
from sightline.view.fenced_run_dir import list_files

LOG_BYTES = 65_536
"""Maximum bytes of a log in one answer."""
_QUEUES = ("groups_ahead", "in_flight", "waiting")


def describe_processes(run: RunView) -> dict[str, Any]:
    newest = run.history.newest("step")
    trained = run.history.newest("train")
    logs = list_files(run.run_dir.logs)
    names = {n.removesuffix(".log") for n in logs if n.endswith(".log")}
    names |= set(run.history.last_seen)
    return {
        "now": time.time(),
        "state": run.state,
        "phase": run.history.phase,
        "processes": [
            {
                "name": name,
                "last": _last_activity(run, name, logs),
                "log_bytes": logs[f"{name}.log"].st_size if f"{name}.log" in logs else None,
                "last_line": _read_last_line(run, name),
            }
            for name in sorted(names)
        ],
        "queues": {name: newest[name] for name in _QUEUES if name in newest},
        "seconds": _table(trained, "seconds."),
        "workers_lost": _table(newest, "workers_lost."),
        "dropped": dict(run.history.dropped),
        "notes": [
            {name: getattr(note, name) for name in ("time", "process", "kind", "step")}
            | {"text": _format_values(note.values)}
            for note in reversed(list(run.history.notes)[-100:])
        ],
    }


def _last_activity(run: RunView, name: str, logs: dict[str, os.stat_result]) -> float | None:
    """Return the time of a process's last event, heartbeat or log line."""
    files = (run.run_dir.heartbeat(name).name, f"{name}.log")
    times = [logs[file].st_mtime for file in files if file in logs]
    if name in run.history.last_seen:
        times.append(run.history.last_seen[name])
    return max(times, default=None)


def _table(row: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): v for name, v in row.items() if name.startswith(prefix)}


def _format_values(values: dict[str, Any]) -> str:
    texts = (f"{name} {value}" for name, value in values.items() if not isinstance(value, dict))
    return ", ".join(texts)[:600]


def find_log(run: RunView, name: str, before: int | None = None) -> dict[str, Any] | None:
    """Return up to LOG_BYTES of a log before byte `before`, or from the end of the file.

    The name must be that of an existing file in the log folder.
    """
    if f"{name}.log" not in list_files(run.run_dir.logs):
        return None
    try:
        with open_file(run.run_dir.logs / f"{name}.log") as file:
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


def _read_last_line(run: RunView, name: str) -> str:
    """Return the last non-empty line of a log, or an empty string."""
    log = find_log(run, name)
    lines = [] if log is None else log["text"].splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
