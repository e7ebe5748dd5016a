"""Edits of source code in a copy, for tests of tests. Each `old` occurs once in its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    """Occurs once in the file. Later lines have the indentation of the first."""
    new: str

    def apply(self, folder: Path) -> None:
        source = (folder / self.file).read_text()
        old, new = self.old.strip("\n"), self.new.strip("\n")
        first = [line for line in source.splitlines() if old.splitlines()[0] in line]
        starts = {"\n" + line[: len(line) - len(line.lstrip())] for line in first}
        pairs = [(old.replace("\n", start), new.replace("\n", start)) for start in starts]
        matches = [pair for pair in pairs if source.count(pair[0]) == 1]
        assert len(matches) == 1, f"{self.file} does not hold once: {self.old}"
        (folder / self.file).write_text(source.replace(*matches[0]))
