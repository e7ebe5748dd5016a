"""`sightline bench`: the list of benchmarks, and the cost of listing them."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import sightline.bench
from sightline.bench import BENCHMARKS

PROGRAM = """
import sys
from sightline.cli.main import main
try:
    main(["bench", "--help"])
except SystemExit:
    print([name for name in ("torch", "transformers", "PIL", "zmq") if name in sys.modules])
"""


def test_every_bench_module_is_a_benchmark() -> None:
    names = [one.name for one in pkgutil.iter_modules(sightline.bench.__path__) if not one.ispkg]
    assert sorted(names) == list(BENCHMARKS)
    for name in names:
        module = importlib.import_module(f"sightline.bench.{name}")
        assert callable(module.add_arguments) and callable(module.run)


def test_listing_the_benchmarks_loads_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    printed = " ".join(done.stdout.split())
    assert all(summary in printed for summary in BENCHMARKS.values())
