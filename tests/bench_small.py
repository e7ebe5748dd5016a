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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"


def read_commands() -> list[list[str]]:
    """The words of every command under the heading "Smallest sizes"."""
    (block,) = re.findall(r"^## Smallest sizes\n.*?```sh\n(.*?)```", PAGE.read_text(), re.M | re.S)
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def main() -> int:
    failed, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), folder])}
        for words in read_commands():
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            print(f"{time.monotonic() - started:6.1f} s  {shlex.join(words)}", flush=True)
            if done.returncode:
                failed.append(words)
                print(done.stdout)
    print(f"{time.monotonic() - began:6.1f} s  in all; failed: {len(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
