"""The processes of a run, read from /proc."""

from __future__ import annotations

from pathlib import Path


def processes() -> list[tuple[int, int, list[str]]]:
    """Return the pid, parent and command line of every readable process."""
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            state, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            pids.append((int(folder.name), int(owner), words))
    return pids


def find_child(parent: int, name: str) -> int | None:
    """The process `name` that the launcher `parent` started."""
    for pid, owner, words in processes():
        if owner == parent and "process" in words and name in words:
            return pid
    return None


def names_of(run: Path) -> list[str]:
    """Return the processes that work for the run directory `run`."""
    return [
        words[words.index("process") + 1]
        for _, _, words in processes()
        if "process" in words and str(run) in words
    ]
