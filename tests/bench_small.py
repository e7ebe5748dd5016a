"""Runs every benchmark in its smallest size: `make bench-small`.

The commands are those that docs/benchmarks.md lists, so that no documented one can break unnoticed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"


def read_commands() -> list[list[str]]:
    """The words of every command under the heading "Smallest sizes"."""
    (block,) = re.findall(r"^## Smallest sizes\n.*?```sh\n(.*?)```", PAGE.read_text(), re.M | re.S)
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def run_command(words: list[str], folder: str) -> bool:
    """Runs a command, two of them at a time: their figures are not looked at."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), folder])}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    told = done.stdout if done.returncode else ""
    print(f"{time.monotonic() - started:6.1f} s  {shlex.join(words)}\n{told}", end="", flush=True)
    return done.returncode == 0


def main() -> int:
    began = time.monotonic()
    first, *others = read_commands()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        Path(folder, ".venv-trl").symlink_to(ROOT / ".venv-trl")
        passed = [run_command(first, folder)]
        passed += pool.map(lambda words: run_command(words, folder), others)
    print(f"{time.monotonic() - began:6.1f} s  in all; failed: {passed.count(False)}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
