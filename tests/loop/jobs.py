"""Start whole jobs as a user would, and inspect their files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sightline.run import RunDir
from sightline.view.events import by_step, read_events

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "color_codeword"


def sightline(
    *words: str | Path, cwd: Path, check: bool = True, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "sightline", *map(str, words)],
        cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


class Job:
    """A running `sightline rl`."""

    def __init__(self, cwd: Path, *words: str, within: Sequence[str] = ()) -> None:
        """`within`: words that run the command on another machine."""
        self.cwd = cwd
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "sightline", "rl", "--plain", *words],
            cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @property
    def run_dir(self) -> RunDir:
        return RunDir(sorted((self.cwd / "runs").glob("job-*"))[-1])

    def wait_for_step(self, step: int, timeout_s: float = 240.0) -> None:
        def there() -> bool:
            runs = sorted((self.cwd / "runs").glob("job-*"))
            if not runs:
                return False
            return max(by_step(read_events(RunDir(runs[-1]).metrics), "train"), default=0) >= step

        self.wait_until(there, timeout_s)

    def wait_until(self, there: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not there():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, "the job makes no progress"
            time.sleep(0.1)

    def pid_of(self, name: str) -> int:
        """Return the PID of the process `name` among the launcher's children."""
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except (OSError, IndexError):
                continue
            if "process" in words and name in words and int(parent) == self.process.pid:
                return int(folder.name)
        raise AssertionError(f"no process {name!r}")

    def kill(self, name: str) -> None:
        os.kill(self.pid_of(name), signal.SIGKILL)

    def output(self, timeout_s: float = 300.0) -> str:
        out, _ = self.process.communicate(timeout=timeout_s)
        return out


def ledger(run_dir: RunDir) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in run_dir.ledger.read_bytes().splitlines()]
    return [(line["step"], line["batch"]) for line in lines]


def summary(run_dir: RunDir) -> dict[str, Any]:
    return json.loads(run_dir.summary.read_text())  # type: ignore[no-any-return]


def live_processes(run_dir: RunDir) -> list[str]:
    """Processes that still work for the run."""
    descriptions = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            home = (folder / "cwd").readlink()
        except OSError:
            continue
        # The launcher prints the run directory as given, relative to its own folder.
        if "process" in words and any((home / word) == run_dir.path for word in words if word):
            descriptions.append(" ".join(words))
    return descriptions
