"""The result of a soak test: growing processes, and processes that were missing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.harness.process_watch import ProcessSample, ProcessWatch, sample_processes
from benchmarks.soak import (
    PROCESSES,
    find_growth,
    find_lasting,
    show,
)

LEAKS = """
import sys, threading
held, over = [], threading.Event()
print("up", flush=True)
for _ in sys.stdin:
    thread = threading.Thread(target=over.wait)
    thread.start()
    held += [bytes(b"x" * (1 << 20)), open("/dev/null"), thread]
    print("grown", flush=True)
over.set()
"""


def test_leaking_process_is_named() -> None:
    words = [sys.executable, "-c", LEAKS]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    watch = ProcessWatch()
    try:
        assert child.stdout.readline() == b"up\n"
        for minute in range(20):
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"grown\n"
            watch.samples += sample_processes(os.getpid(), minute * 60.0)
    finally:
        child.communicate()
    lasting = {name: of for name, of in find_lasting(watch).items() if of[0].pid == child.pid}
    assert len(lasting) == 1
    units = [words.rpartition(":")[2].split()[3] for words in find_growth(lasting)]
    assert units == ["MB", "descriptors", "threads"]


Memory = Callable[[float], float]


def watch_of(minutes: float, **memory: Memory) -> ProcessWatch:
    """Return a watch of all processes of a run. `memory` gives the MB of each at a minute."""
    watch = ProcessWatch()
    for moment in range(0, int(minutes * 60) + 1, 2):
        watch.samples += [
            ProcessSample(moment, name, pid, int(1e6 * memory[key](moment / 60)), 30, 5)
            for pid, name in enumerate(PROCESSES)
            if (key := name.partition("-")[0]) in memory
        ]
    return watch


def flat(minute: float) -> float:
    return 80.0


def swings(minute: float) -> float:
    """By 120 MB within a step of 5 s."""
    return 450 + 60 * (1 + math.sin(minute * 60 / 5 * 2 * math.pi))


OTHERS = dict.fromkeys(("rl", "orchestrator", "worker"), flat)


def test_caches_filled_during_warm_up_are_no_leak(capsys: pytest.CaptureFixture[str]) -> None:
    watch = watch_of(30, server=lambda m: 460 + 5 * min(m, 7), trainer=swings, **OTHERS)
    assert show(watch, 1) == []
    assert "flat: yes" in capsys.readouterr().out


def test_slow_leak_is_detected_despite_fluctuations(capsys: pytest.CaptureFixture[str]) -> None:
    watch = watch_of(30, server=flat, trainer=lambda m: swings(m) + 0.5 * m, **OTHERS)
    assert show(watch, 1) == ["trainer: 30.0 ± 0.0 MB more an hour, 20 may be"]
    assert "flat: no" in capsys.readouterr().out


def test_replaced_or_unwatched_process_is_named() -> None:
    watch = watch_of(1, server=flat, **OTHERS)
    for sample in watch.samples[:]:
        if sample.name == "worker-0" and sample.seconds > 30:
            watch.samples.remove(sample)
    assert show(watch, 1) == [
        f"{name}: not there from first to last" for name in ("trainer", "worker-0")
    ]
