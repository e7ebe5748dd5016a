"""Runs the suites that a family must pass on cases from outside, in a process of their own."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THIRD_FAMILY = Path(__file__).with_name("third_family")
SUITES = ("test_family", "test_forward", "test_renderer", "test_renderer_refusals")


@dataclass(frozen=True)
class Result:
    """How a test of a suite ended."""

    test: str
    case: str
    variant: str
    """The parameters of a parametrized test, without the case."""
    outcome: str
    """`passed`, `failed` in the test itself, or `error` and `skipped`."""
    message: str


def promises() -> dict[str, int]:
    """Every test of the suites, and how many variants of it a case goes through."""
    found: dict[str, int] = {}
    for suite in SUITES:
        module = importlib.import_module(f"tests.contract.{suite}")
        for name, test in vars(module).items():
            if name.startswith("test_"):
                marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
                found[name] = math.prod(len(mark.args[1]) for mark in marks)
    return found


def run_suites(
    home: Path, module: str, names: Collection[str], *words: str
) -> tuple[list[Result], str]:
    """The results on the CASES of a module in folder `home`, and what was printed.

    `names` are those of its cases.
    """
    report = home / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
        *(f"tests/contract/{suite}.py" for suite in SUITES),
        *("--cases", module, f"--junitxml={report}", f"--basetemp={home / 'scratch'}"),
        *words,
    ]
    path = os.pathsep.join([str(home), *_path()])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=570,
    )
    # A session that was interrupted tells of a part of its tests, and of one without a name.
    if done.returncode not in (0, 1):
        print(done.stdout[-20_000:], done.stderr[-3000:])
        raise AssertionError(f"pytest exited with {done.returncode}: see what is printed")
    ended = ElementTree.parse(report).iter("testcase")
    return [_result(found, names) for found in ended], done.stdout


def _path() -> list[str]:
    found = os.environ.get("PYTHONPATH")
    return [found] if found else []


def _result(found: ElementTree.Element, names: Collection[str]) -> Result:
    test, _, parameters = found.attrib["name"].partition("[")
    parts = parameters.removesuffix("]").split("-")
    # A suite that cannot be collected is an error of no case.
    case = next((part for part in parts if part in names), "")
    child = next((c for c in found if c.tag in ("failure", "error", "skipped")), None)
    outcome = "passed" if child is None else child.tag.replace("failure", "failed")
    message = "" if child is None else child.attrib.get("message", "")
    variant = "-".join(part for part in parts if part != case)
    return Result(test, case, variant, outcome, message)
