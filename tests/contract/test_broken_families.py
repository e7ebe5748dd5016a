"""Break each rule of the suites, and check that the right test fails."""

from __future__ import annotations

from collections import defaultdict

import pytest
from shards import IS_FULL

from tests.contract.broken import Broken, read_broken
from tests.contract.suites import Result, promises, run_suites

# The first test waits for the run that all tests use.
pytestmark = pytest.mark.timeout(600)

BROKEN = read_broken()
COLLECT = """
from importlib import import_module
CASES = tuple(case for name in {names!r} for case in import_module(name + "_cases").CASES)
"""
MISHAPS = ("AttributeError", "ImportError", "NameError", "SyntaxError", "TypeError")
"""Errors of a family that crashes before it breaks a rule."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Run all broken families in one session, so that libraries are loaded once."""
    home = tmp_path_factory.mktemp("broken")
    names = [broken.name for broken in BROKEN]
    for broken in BROKEN:
        broken.write(home)
    (home / "broken_cases.py").write_text(COLLECT.format(names=names))
    plugin = ("-p", "tests.contract.broken", "--hypothesis-profile=broken")
    outcomes, printed = run_suites(home, "broken_cases", names, *plugin)
    assert all(result.case for result in outcomes), printed
    return outcomes


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_broken_family_fails_the_matching_suite_test(broken: Broken, results: list[Result]) -> None:
    mine = [result for result in results if result.case == broken.name]
    failed = {result.test for result in mine if result.outcome == "failed"}
    assert failed == set(broken.fails), mine
    assert [r for r in mine if r.outcome not in ("passed", "failed")] == []
    assert [r for r in mine if r.message.startswith(MISHAPS)] == []


@pytest.mark.skipif(not IS_FULL, reason="of all broken families; run by `make full`")
def test_every_suite_test_is_failed_by_some_broken_family(results: list[Result]) -> None:
    failed: defaultdict[str, set[str]] = defaultdict(set)
    for result in results:
        failed[result.test] |= {result.variant} if result.outcome == "failed" else set()
    assert {test: len(failed[test]) for test in promises()} == promises()
