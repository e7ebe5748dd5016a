"""Every mutant still changes its file, and names existing tests."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from mutants.run import ROOT, read_list

LAWS, MUTANTS = read_list()
PAGE = ROOT / "docs" / "internals" / "fault_tests.md"


def test_every_mutant_changes_its_file(tmp_path: Path) -> None:
    for mutant in MUTANTS:
        file = tmp_path / mutant.edit.file
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / mutant.edit.file, file)
        mutant.edit.apply(tmp_path)
        assert file.read_text() != (ROOT / mutant.edit.file).read_text(), mutant.name
        compile(file.read_text(), mutant.edit.file, "exec")


def test_every_mutant_names_existing_tests() -> None:
    assert [mutant.name for mutant in MUTANTS if not all(map(is_there, mutant.tests))] == []


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_every_law_has_a_mutant() -> None:
    assert {mutant.law for mutant in MUTANTS} == set(LAWS)


def test_the_page_counts_the_mutants_of_every_law() -> None:
    counts = Counter(mutant.law for mutant in MUTANTS)
    rows = [f"| {law}. {words} | {counts[law]} |" for law, words in LAWS.items()]
    page = PAGE.read_text()
    assert [row for row in rows if row not in page] == []
    assert f"[{len(MUTANTS)} mutants]" in (ROOT / "docs" / "reliability.md").read_text()
