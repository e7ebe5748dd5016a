"""A family in a folder outside the package passes the suites. No shared file names it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.contract.suites import ROOT, SUITES, THIRD_FAMILY, promises, run_suites


@pytest.mark.timeout(600)
def test_external_family_passes_every_suite(tmp_path: Path) -> None:
    home = Path(shutil.copytree(THIRD_FAMILY, tmp_path / "elsewhere"))
    results, printed = run_suites(home, "pebble_cases", ["pebble"])
    assert [result for result in results if result.outcome != "passed"] == []
    # Every variant of every test ran.
    assert Counter(result.test for result in results) == promises()
    assert "deselected" not in printed


def test_no_shared_file_names_the_third_family() -> None:
    suites = [f"tests/contract/{name}.py" for name in ("conftest", "case", "suites", *SUITES)]
    shared = [*(ROOT / "src").rglob("*.py"), *(ROOT / file for file in ("pyproject.toml", *suites))]
    assert [str(file) for file in shared if "pebble" in file.read_text().lower()] == []
