"""`sightline bench NAME`: measure this machine's speed in training and serving."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from sightline.bench import BENCHMARKS
from sightline.cli.main import Parser


class BenchmarkParser(Parser):
    """Parser for one benchmark. It imports the benchmark's module when it parses arguments."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        module = importlib.import_module(f"sightline.bench.{self.prog.rpartition(' ')[2]}")
        module.add_arguments(self)
        self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nested = parser.add_subparsers(metavar="NAME", required=True, parser_class=BenchmarkParser)
    for name, summary in BENCHMARKS.items():
        nested.add_parser(name, help=summary)
