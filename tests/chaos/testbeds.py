"""The testbed of a run with faults: a disk, a clock, and a connection to its server."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from chaos_run import PATIENCE_S, ChaosRun
from proxy import Proxy

DISK_BYTES = 4 << 30
"""More than the run keeps in reserve. The file behind it is sparse."""
ALMOST_BYTES = 32 << 20
"""The space left for writes to fill: the file system needs some for itself."""
FOLDERS = ("traces", "batches", "weights", "checkpoints")


class Disk:
    """A file system of its own, which can get full and whose folders can be locked."""

    def __init__(self, home: Path) -> None:
        self.home, self.image = home, home.with_name(f"{home.name}.img")

    def mount(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.unmount()
        with open(self.image, "wb") as file:
            file.truncate(DISK_BYTES)
        _call("mkfs.ext4", "-q", "-m", "0", str(self.image))
        _call("mount", "-o", "loop", str(self.image), str(self.home))

    def unmount(self) -> None:
        while os.path.ismount(self.home):
            _call("umount", "--lazy", str(self.home))
        self.image.unlink(missing_ok=True)

    @contextmanager
    def filled(self) -> Iterator[None]:
        filler = self.home / "filler"
        try:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                free = shutil.disk_usage(self.home).free
                os.posix_fallocate(file.fileno(), 0, free - ALMOST_BYTES)
                file.seek(0, os.SEEK_END)
                while True:
                    file.write(bytes(1 << 16))
            yield
        finally:
            filler.unlink(missing_ok=True)

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Nobody may make a file in the folder, not even root."""
        _call("chattr", "+i", str(folder))
        try:
            yield
        finally:
            _call("chattr", "-i", str(folder))


@dataclass
class Testbed:
    run: ChaosRun
    disk: Disk
    stack: ExitStack
    clock: Path | None = None

    def set_clock(self, offset: str) -> None:
        assert self.clock is not None
        self.clock.write_text(offset)

    @cached_property
    def proxy(self) -> Proxy:
        raise AssertionError("this testbed has no proxy")


@dataclass
class Testbeds:
    home: Path
    rng: random.Random
    stack: ExitStack
    missing: dict[str, str] = field(default_factory=dict)
    """Kinds of faults that cannot happen on this machine, and why."""

    def __post_init__(self) -> None:
        can_mount = os.geteuid() == 0 and shutil.which("mkfs.ext4") and shutil.which("chattr")
        if not can_mount:
            reason = "needs root and mkfs.ext4"
            self.missing |= dict.fromkeys(("disk full", "no permission"), reason)
        if find_libfaketime() is None:
            self.missing["clock"] = "needs libfaketime"

    def open(self, name: str) -> Testbed:
        home = self.home / name
        run, disk = ChaosRun(home, self.rng), Disk(home)
        self.stack.callback(_end, run)
        if name == "disk" and "disk full" not in self.missing:
            disk.mount()
            self.stack.callback(disk.unmount)
        testbed = Testbed(run, disk, self.stack)
        run.prepare()
        if name == "clock":
            testbed.clock = home / "clock"
            testbed.set_clock("+0")
            run.variables |= {
                "LD_PRELOAD": str(find_libfaketime()),
                "FAKETIME_TIMESTAMP_FILE": str(testbed.clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "NO_FAKE_STAT": "1",
            }
        if name == "proxy":
            server = self.stack.enter_context(_serve(run))
            testbed.proxy = self.stack.enter_context(Proxy(server))
            run.overrides = (
                f'inference.servers=["{testbed.proxy.url}"]',
                f"media.root={home / 'media'}",
            )
        return testbed


@contextmanager
def open_testbeds(home: Path, rng: random.Random) -> Iterator[Testbeds]:
    with ExitStack() as stack:
        yield Testbeds(home, rng, stack)


@contextmanager
def _serve(run: ChaosRun) -> Iterator[str]:
    """The address of a server that the run did not start."""
    (run.home / "runs").mkdir(exist_ok=True)
    words = ["serve", "tiny", "--media", "media", "--port", "0", "--threads", "1"]
    words += ["--max-model-len", "128", "--max-num-seqs", "16", "--weights-root", "runs"]
    log = open(run.home / "server.log", "wb")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "sightline", *words],
        cwd=run.home, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving "))
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
        log.close()


def find_libfaketime() -> Path | None:
    return next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


def _end(run: ChaosRun) -> None:
    if run.process is not None and run.process.poll() is None:
        run.process.terminate()
        run.process.wait()


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
