"""Samples the memory, descriptors and threads of processes from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessSample:
    seconds: float
    """Seconds since the watch began."""
    name: str
    pid: int
    rss_bytes: int
    descriptors: int
    threads: int


@dataclass
class ProcessWatch:
    """Samples all descendants of this process every `every_s` seconds, in a thread."""

    every_s: float = 1.0
    samples: list[ProcessSample] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        over, began = Event(), time.monotonic()

        def watch() -> None:
            while True:
                self.samples += sample_processes(os.getpid(), time.monotonic() - began)
                if over.is_set():
                    return  # after a final sample
                over.wait(self.every_s)

        thread = Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def by_process(self) -> dict[str, list[ProcessSample]]:
        """Return the samples of each process with at least two, by name and pid."""
        by_name: dict[str, list[ProcessSample]] = {}
        for sample in self.samples:
            by_name.setdefault(f"{sample.name} {sample.pid}", []).append(sample)
        return {name: samples for name, samples in by_name.items() if len(samples) > 1}

    def total_bytes(self) -> list[float]:
        """Return the total memory of all processes at each sample time."""
        totals: dict[float, float] = {}
        for sample in self.samples:
            totals[sample.seconds] = totals.get(sample.seconds, 0) + sample.rss_bytes
        return list(totals.values())


def sample_processes(root: int, seconds: float) -> list[ProcessSample]:
    """Sample the descendants of `root`, except those that end meanwhile."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    below, process_samples = {root}, []
    for pid in sorted(parents):
        ancestors, at = [pid], pid
        while at in parents and at not in below:
            at = parents[at]
            ancestors.append(at)
        if at in below:
            below.update(ancestors)
    for pid in sorted(below - {root}):
        with contextlib.suppress(OSError):
            process_samples.append(_read_sample(pid, seconds))
    return process_samples


def _read_sample(pid: int, seconds: float) -> ProcessSample:
    place = PROC / str(pid)
    lines = (line.split(":", 1) for line in (place / "status").read_text().splitlines())
    status = {name: value.split() for name, value in lines}
    words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return ProcessSample(
        seconds,
        _find_name(words, status["Name"][0]),
        pid,
        int(status.get("VmRSS", ["0"])[0]) * 1024,
        len(os.listdir(place / "fd")),
        int(status["Threads"][0]),
    )


def _find_name(words: list[str], default: str) -> str:
    """Return the name of a run's process, else its sightline command, else `default`."""
    if "sightline" not in words:
        return default
    command = words[words.index("sightline") + 1 :]
    return command[1] if command[:1] == ["process"] else command[0]
