"""The testbed of a run with faults: a disk, a clock, and a connection to its server."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from chaos_run import PATIENCE_S, ROOT, ChaosRun
from proxy import Proxy

sys.path.insert(0, str(ROOT / "tests"))
from store_kinds import s3_server

DISK_BYTES = 4 << 30
"""More than the run's disk reserve. The image file is sparse."""
ALMOST_BYTES = 32 << 20
"""The space left for writes to fill: the file system needs some for itself."""
NUM_INODES = 16384
"""Few, so that they run out soon."""
FOLDERS = ("traces", "batches", "weights", "checkpoints")
ON_DISKS = ("disk full", "no permission", "no inodes", "read-only")
DISKS = (*FOLDERS, "scores", "media", "logs")
"""Folders that get a disk of their own, which then is full or read-only."""
BUCKET_URL = "s3://images/chaos"


class Disk:
    """A separate file system, which can get full and whose folders can be locked."""

    def __init__(self, home: Path, image: Path) -> None:
        self.home, self.image = home, image
        self.inner: list[Disk] = []
        """Disks that are mounted on folders of this one."""

    def mount(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.unmount()
        with open(self.image, "wb") as file:
            file.truncate(DISK_BYTES)
        _call("mkfs.ext4", "-q", "-m", "0", "-N", str(NUM_INODES), str(self.image))
        self._mount()

    def _mount(self) -> None:
        _call("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self.home))

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
    def without_inodes(self) -> Iterator[None]:
        filler = self.home / "filler"
        filler.mkdir()
        try:
            with contextlib.suppress(OSError):
                for number in range(NUM_INODES):
                    (filler / str(number)).touch()
            yield
        finally:
            shutil.rmtree(filler)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """As an administrator makes it: refused while a file is open for writing."""
        for _ in range(1000):
            with contextlib.suppress(subprocess.CalledProcessError):
                _call("mount", "-o", "remount,ro", str(self.home))
                break
            time.sleep(0.01)
        else:
            raise AssertionError(f"{self.home} always has a file that is open for writing")
        yield
        _call("mount", "-o", "remount,rw", str(self.home))

    @contextmanager
    def failed(self) -> Iterator[None]:
        """As the kernel makes it after an error of the disk: read-only, whatever is open."""
        devices = subprocess.run(["losetup", "-nO", "NAME", "-j", str(self.image)],
                                 check=True, capture_output=True, text=True).stdout  # fmt: skip
        Path("/sys/fs/ext4", Path(devices.strip()).name, "trigger_fs_error").write_text("1")
        yield
        for disk in (*self.inner, self):
            _call("umount", str(disk.home))
        subprocess.run(["e2fsck", "-fy", str(self.image)], capture_output=True, check=False)
        for disk in (self, *self.inner):
            disk._mount()

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Make the folder read-only for all users, even root."""
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

    @cached_property
    def folder_disks(self) -> dict[str, Disk]:
        """Move each folder of `DISKS` to its own disk, where it stays. Return the disks."""
        run, disks = self.run, dict[str, Disk]()
        paths = [run.run_dir.path / folder for folder in DISKS]
        run.wait(lambda: all(any(path.glob("*")) for path in paths), "there is a file in each")
        run.stop()
        for path in paths:
            disks[path.name] = disk = Disk(path, self.disk.image.with_name(f".{path.name}.img"))
            copy = path.rename(path.with_name(f".{path.name}.copy"))
            disk.mount()
            self.stack.callback(disk.unmount)
            self.disk.inner.append(disk)
            shutil.copytree(copy, path, dirs_exist_ok=True)
            shutil.rmtree(copy)
        run.ensure_running()
        return disks

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
            self.missing |= dict.fromkeys(ON_DISKS, reason)
        if find_libfaketime() is None:
            self.missing["clock"] = "needs libfaketime"
        if find_spec("moto") is None or find_spec("obstore") is None:
            self.missing["object store"] = "needs moto and obstore"

    def open(self, name: str) -> Testbed:
        home = self.home / name
        run, disk = ChaosRun(home, self.rng), Disk(home, home.with_name(f".{name}.img"))
        if name == "compared":  # a run whose results depend on nothing but its seed
            run.ranks, run.overrides = 1, ("model.exact=true", "orchestrator.max_lag=0")
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
        if name == "object store":
            endpoint = self.stack.enter_context(s3_server())
            testbed.proxy = self.stack.enter_context(Proxy(endpoint, "/"))
            run.variables["AWS_ENDPOINT_URL"] = testbed.proxy.url
            run.overrides = (f"media.root={BUCKET_URL}",)
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
