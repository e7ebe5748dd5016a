"""`sightline bench NAME`: measures a part and prints the figures."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from sightline.cli.main import attach, command_names

PREFIX = "bench_"


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure a part and print the figures")
    nested = parser.add_subparsers(metavar="NAME", required=True)
    for name in command_names(PREFIX):
        attach(importlib.import_module(f"sightline.cli.{name}"), nested)


def run(args: argparse.Namespace) -> int:
    raise AssertionError("every benchmark has its own run")
