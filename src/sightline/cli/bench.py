"""`sightline bench NAME`: measures a part and prints the figures."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import sightline.bench as benchmarks
from sightline.cli.main import add_command


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure a part and print the figures")
    nested = parser.add_subparsers(metavar="NAME", required=True)
    for name in sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__)):
        module = importlib.import_module(f"sightline.bench.{name}")
        if hasattr(module, "add"):
            add_command(module, nested)
