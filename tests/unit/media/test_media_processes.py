"""Many real processes on one store: writers of the same and of different images, readers that
follow, a sweep among them, and writers that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from sightline.media import MediaStore
from sightline.media.files import TEMPORARY_PREFIX

Python = Callable[..., "subprocess.Popen[str]"]

# A PNG of a seed, small and without Pillow, so that processes start fast.
MAKE = """
import os, struct, sys, time, zlib
from sightline.media import MediaStore
from sightline.errors import MediaMissing

def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

def image(seed, padding=0):
    head = b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 8, 2, 0, 0, 0))
    pixels = zlib.compress(b"\\0" + struct.pack(">I", seed) + b"\\7\\7")
    return head + chunk(b"tEXt", b"p" * padding) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")

store = MediaStore(sys.argv[1])
"""

WRITE = (
    MAKE
    + """
own = int(sys.argv[2])
for i in range(40):
    assert store.get(store.put(image(i))) == image(i)
    ref = store.put(image(1000 * own + i))
    assert store.get_ref(ref.digest) == ref
"""
)

READ = (
    MAKE
    + """
from hashlib import sha256
seen = 0
until = time.monotonic() + 90
while seen < 40 and time.monotonic() < until:
    digest = sha256(image(seen)).hexdigest()
    try:
        store.get(store.get_ref(digest))
        seen += 1
    except MediaMissing:
        time.sleep(0.001)
assert seen == 40, seen
"""
)

SWEEP = (
    MAKE
    + """
for _ in range(30):
    report = store.gc(set(), min_age_s=600)
    assert not report.removed and not report.num_temporary, report
"""
)

FOREVER = (
    MAKE
    + """
print("ready", flush=True)
seed = 10_000 * int(sys.argv[2])
while True:
    store.put(image(seed, padding=300_000))
    seed += 1
"""
)


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors


def find_leftovers(store: MediaStore) -> list[Path]:
    return list(Path(store.root).rglob(f"{TEMPORARY_PREFIX}*"))


def test_processes_can_put_read_and_gc_images_concurrently(
    store: MediaStore, python: Python
) -> None:
    store.check_writable()
    finish(
        [python(WRITE, store.root, own) for own in (1, 2, 3, 4)]
        + [python(READ, store.root) for _ in range(2)]
        + [python(SWEEP, store.root)]
    )
    report = store.verify()
    assert (report.num_files, report.corrupt) == (5 * 40, [])
    assert not find_leftovers(store)


def test_killed_writers_leave_no_readable_partial_file(store: MediaStore, python: Python) -> None:
    chance = random.Random(7)
    for round_ in range(2):
        writers = [python(FOREVER, store.root, 3 * round_ + own + 1) for own in range(3)]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(0.05 + chance.random() / 10)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.communicate()
    report = store.verify()
    assert report.corrupt == []
    assert report.num_files > 0
    for digest in store.digests():
        assert sha256(store.get(store.get_ref(digest))).hexdigest() == digest
    leftovers = find_leftovers(store)
    for leftover in leftovers:
        os.utime(leftover, (1, 1))
    in_use = set(store.digests())
    assert store.gc(in_use).num_temporary == len(leftovers)
    assert set(store.digests()) == in_use
