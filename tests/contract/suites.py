"""Run the suites that a family must pass on external cases, in their own process."""

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
    """The outcome of a test."""

    test: str
    case: str
    variant: str
    """The parameters of a parametrized test, without the case."""
    outcome: str
    """`passed`, `failed` in the test itself, or `error` and `skipped`."""
    message: str


def promises() -> dict[str, int]:
    """Every test of the suites, and how many variants of it a case goes through."""
    num_runs: dict[str, int] = {}
    for suite in SUITES:
        module = importlib.import_module(f"tests.contract.{suite}")
        for name, test in vars(module).items():
            if name.startswith("test_"):
                marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
                num_runs[name] = math.prod(len(mark.args[1]) for mark in marks)
    return num_runs


def run_suites(
    home: Path, module: str, names: Collection[str], *words: str
) -> tuple[list[Result], str]:
    """Run the suites on the CASES of a module in folder `home`.

    Return the results and the output. `names` are the names of its cases.
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
    # An interrupted session reports some of its tests, and one without a name.
    if done.returncode not in (0, 1):
        print(done.stdout[-20_000:], done.stderr[-3000:])
        raise AssertionError(f"pytest exited with {done.returncode}: see what is printed")
    ended = ElementTree.parse(report).iter("testcase")
    return [_result(ended_runs, names) for ended_runs in ended], done.stdout


def _path() -> list[str]:
    python_path = os.environ.get("PYTHONPATH")
    return [python_path] if python_path else []


def _result(found: ElementTree.Element, names: Collection[str]) -> Result:
    test, _, parameters = found.attrib["name"].partition("[")
    parts = parameters.removesuffix("]").split("-")
    # A suite that cannot be collected is not an error of a case.
    case = next((part for part in parts if part in names), "")
    child = next((c for c in found if c.tag in ("failure", "error", "skipped")), None)
    outcome = "passed" if child is None else child.tag.replace("failure", "failed")
    message = "" if child is None else child.attrib.get("message", "")
    variant = "-".join(part for part in parts if part != case)
    return Result(test, case, variant, outcome, message)
