"""Memory of a process, and its growth rate."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.harness.process_watch import ProcessWatch

HOLDS = """
import sys, threading
files = [open("/dev/null") for _ in range(40)]
held = bytearray(64 << 20)
over = threading.Event()
threads = [threading.Thread(target=over.wait) for _ in range(5)]
for thread in threads: thread.start()
print("up", flush=True)
sys.stdin.read()
over.set()
"""


def test_a_watch_sees_memory_descriptors_and_threads_of_a_child() -> None:
    words = [sys.executable, "-c", HOLDS]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"up\n"
    watch = ProcessWatch(every_s=0.01)
    try:
        with watch.watching():
            while len(watch.samples) < 3:
                time.sleep(0.01)
    finally:
        child.communicate()
    (samples,) = (s for s in watch.by_process().values() if s[0].pid == child.pid)
    assert samples[0].rss_bytes > 64 << 20
    assert samples[0].descriptors >= 43 and samples[0].threads == 6
