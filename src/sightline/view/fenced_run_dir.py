"""A run directory out of which no link is followed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sightline.run.run_dir import RunDir

_NOWHERE = Path(os.devnull)
"""Nothing can be below it: what is read there is missing, and nothing can be written."""
_READ = (
    "config.toml", "metrics.jsonl", "notes.md", "verdicts.jsonl", "summary.json", ".lock", "view",
    "media",
)  # fmt: skip
_FOLDERS = ("logs", "traces", "scores")


@dataclass(frozen=True, slots=True)
class FencedRunDir(RunDir):
    """A path whose links lead out of `root` is one where nothing is; so are pipes and devices."""

    root: Path
    """The folder that a command was given, without links in its own path."""

    @classmethod
    def of(cls, run_dir: RunDir) -> FencedRunDir:
        """`run_dir` itself where it has a fence, otherwise with one around the run."""
        if isinstance(run_dir, FencedRunDir):
            return run_dir
        return cls(run_dir.path, run_dir.path.resolve())

    def inside(self, name: str) -> Path:
        path = self.path / name
        return path if is_below(self.root, path) else _NOWHERE / name

    def list_refused(self) -> list[str]:
        """The names inside the run that are not read because of where they lead."""
        found = [name for name in (*_READ, *_FOLDERS) if not is_below(self.root, self.path / name)]
        for folder in _FOLDERS:
            with suppress(OSError), os.scandir(self.inside(folder)) as entries:
                for entry in entries:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                        found.append(f"{folder}/{entry.name}")
        return found


def is_below(root: Path, path: Path) -> bool:
    """Whether a path, its links followed, is a file or folder below `root`, or nothing yet."""
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
