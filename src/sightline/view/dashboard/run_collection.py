"""The runs of a dashboard, found in its folders."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from sightline.errors import ConfigError
from sightline.view.dashboard.run_view import RunView
from sightline.view.fenced_run_dir import FencedRunDir, is_below
from sightline.view.run_files import is_run


class RunCollection:
    """Runs by key. A key is the folder's name, with the parent's name if two are equal."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._given = [path.resolve() for path in paths]
        for path in self._given:
            if not path.is_dir():
                raise ConfigError(
                    f"there is no folder {path}",
                    "name run directories, or a folder that contains some",
                )
        self._views: dict[Path, RunView] = {}
        self._lock = threading.Lock()
        self.discover()
        if not self._views and all(is_run(path) for path in self._given):
            raise ConfigError("no run to show", "name at least one run directory")

    def discover(self) -> None:
        """Find new runs and drop removed ones."""
        roots = {
            run: path
            for path in self._given
            for run in ([path] if is_run(path) else sorted(path.iterdir()))
            if is_below(path, run) and is_run(run)
        }
        with self._lock:
            for path in [path for path in self._views if not path.is_dir()]:
                self._views.pop(path).close()
            for path, root in roots.items():
                if path not in self._views:
                    self._views[path] = RunView(self._key(path), FencedRunDir(path, root))

    def _key(self, path: Path) -> str:
        used_keys = {view.key for view in self._views.values()}
        key, parent = path.name, path.parent
        while key in used_keys:
            key, parent = f"{parent.name or '_'}.{key}", parent.parent
        return key

    def all(self) -> list[RunView]:
        with self._lock:
            return list(self._views.values())

    def find_run(self, key: str) -> RunView | None:
        return next((view for view in self.all() if view.key == key), None)

    def refresh(self) -> None:
        """Read some of the new data of all runs."""
        self.discover()
        for view in self.all():
            view.refresh()

    def close(self) -> None:
        for view in self.all():
            view.close()
