"""`python -m benchmarks NAME`: run one benchmark and print its figures."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import BENCHMARKS
from sightline.cli.main import EXIT_REFUSED, Parser, print_error
from sightline.errors import SightlineError

ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    # Processes that a benchmark starts import environments from this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )
    try:
        args = parse(words)
        return int(args.run(args))
    except SightlineError as error:
        if "--debug" in words:
            raise
        print_error(error)
        return EXIT_REFUSED


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks", description="Run one benchmark of the docs.")
    subparsers = parser.add_subparsers(metavar="NAME", required=True)
    for name, summary in BENCHMARKS.items():
        benchmark = subparsers.add_parser(name, help=summary)
        if name in words[:1]:  # importing a benchmark imports torch
            module = importlib.import_module(f"benchmarks.{name}")
            module.add_arguments(benchmark)
            benchmark.set_defaults(run=module.run)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
