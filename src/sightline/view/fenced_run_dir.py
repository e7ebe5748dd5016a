"""A run directory that does not follow links to the outside."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sightline.run.run_dir import RunDir

_NOWHERE = Path(os.devnull)
"""A path below which no file can exist or be written."""
_READ = (
    "config.toml", "metrics.jsonl", "notes.md", "verdicts.jsonl", "summary.json", ".lock", "view",
    "media",
)  # fmt: skip
_FOLDERS = ("logs", "traces", "scores")


@dataclass(frozen=True, slots=True)
class FencedRunDir(RunDir):
    """A run directory in which links out of `root`, pipes and devices count as missing."""

    root: Path
    """The resolved folder from the command line."""

    @classmethod
    def of(cls, run_dir: RunDir) -> FencedRunDir:
        """Return `run_dir` with a fence, unless it already has one."""
        if isinstance(run_dir, FencedRunDir):
            return run_dir
        return cls(run_dir.path, run_dir.path.resolve())

    def inside(self, name: str) -> Path:
        path = self.path / name
        return path if is_below(self.root, path) else _NOWHERE / name

    def list_refused(self) -> list[str]:
        """Return the names in the run that are not read."""
        names = (*_READ, *_FOLDERS)
        refused = [name for name in names if not is_below(self.root, self.path / name)]
        for folder in _FOLDERS:
            with suppress(OSError), os.scandir(self.inside(folder)) as entries:
                for entry in entries:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                        refused.append(f"{folder}/{entry.name}")
        return refused


def list_files(folder: Path, suffix: str = "") -> dict[str, os.stat_result]:
    """Return the regular files of a folder by name, without links and hidden files."""
    files = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and not entry.name.startswith("."):
                with suppress(FileNotFoundError):  # it was just removed
                    if entry.is_file(follow_symlinks=False):
                        files[entry.name] = entry.stat()
    return files


def is_below(root: Path, path: Path) -> bool:
    """Return whether a path resolves to a file, a folder or a missing path below `root`."""
    real = os.path.realpath(path)
    if not Path(real).is_relative_to(root):
        return False
    try:
        mode = os.stat(real).st_mode
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
