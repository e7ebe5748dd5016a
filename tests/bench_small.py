"""Run benchmarks in their smallest size: `make bench-small` runs the first six, `FULL=1` all.

The commands are those that docs/benchmarks.md lists, so that a broken one is noticed. Importing
torch and transformers would take most of the time, so commands are forked from a server that has
imported them.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shards import take_first

ROOT = Path(__file__).resolve().parents[1]
NUM_TRIED = 5
PAGE = ROOT / "docs" / "benchmarks.md"


def read_commands() -> list[list[str]]:
    """Return the words of every command under the heading "Smallest sizes"."""
    (block,) = re.findall(r"^## Smallest sizes\n.*?```sh\n(.*?)```", PAGE.read_text(), re.M | re.S)
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


FORKS = multiprocessing.get_context("forkserver")


def call(words: list[str], folder: str, log: str) -> None:
    """Run the command in its own process."""
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if words[:3] == ["python", "-m", "benchmarks"]:
        from benchmarks.__main__ import main as run_benchmark

        sys.exit(run_benchmark(words[3:]))
    from sightline.cli.main import main

    sys.exit(main(words[1:]))


def run_command(words: list[str], folder: str) -> bool:
    """Run a command. Two run at a time, because the figures are not used."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r") as log:
        process = FORKS.Process(target=call, args=(words, folder, log.name))
        process.start()
        process.join()
        log_text = log.read() if process.exitcode else ""
    print(
        f"{time.monotonic() - started:6.1f} s  {shlex.join(words)}\n{log_text}", end="", flush=True
    )
    return process.exitcode == 0


def main() -> int:
    began = time.monotonic()
    first, *others = read_commands()
    others = take_first(others, NUM_TRIED)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        # Two commands share the cores: more threads would wait for one another.
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), folder]),
        }
        sys.path.append(str(ROOT))  # where forked processes find `benchmarks`
        FORKS.set_forkserver_preload(["sightline.bench.step"])
        Path(folder, ".venv-trl").symlink_to(ROOT / ".venv-trl")
        passed = [run_command(first, folder)]
        passed += pool.map(lambda words: run_command(words, folder), others)
    print(f"{time.monotonic() - began:6.1f} s  in all; failed: {passed.count(False)}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
