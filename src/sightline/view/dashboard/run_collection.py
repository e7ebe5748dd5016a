"""The runs of a dashboard, found in its folders, and the events that tell browsers of a change.

run directories --refresh every second--> RunWatcher --"moved"--> every open page
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from sightline.errors import ConfigError
from sightline.view.dashboard.run_view import RunView
from sightline.view.run_files import is_run, list_runs

POLL_INTERVAL_S = 1.0
KEEPALIVE_S = 15.0
"""Maximum time between two lines, so that broken connections are noticed."""


class RunCollection:
    """Runs by key. A key is the folder's name, with the parent's name if two are equal."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._given = [path.resolve() for path in paths]
        self._views: dict[Path, RunView] = {}
        self._lock = threading.Lock()
        self.discover()
        if not self._views and all(is_run(path) for path in self._given):
            raise ConfigError("no run to show", "name at least one run directory")

    def discover(self) -> None:
        """Find new runs and drop removed ones."""
        runs = list_runs(self._given)
        with self._lock:
            for path in [path for path in self._views if not path.is_dir()]:
                self._views.pop(path).close()
            for path, run_dir in runs.items():
                if path not in self._views:
                    self._views[path] = RunView(self._key(path), run_dir)

    def _key(self, path: Path) -> str:
        used_keys = {view.key for view in self._views.values()}
        key, parent = path.name, path.parent
        while key in used_keys:
            key, parent = f"{parent.name or '_'}.{key}", parent.parent
        return key

    def all(self) -> list[RunView]:
        with self._lock:
            return list(self._views.values())

    def refresh(self) -> None:
        """Read some of the new data of all runs."""
        self.discover()
        for view in self.all():
            view.refresh()

    def close(self) -> None:
        for view in self.all():
            view.close()


class RunWatcher:
    """Tells browsers with server-sent events that a run has changed. They then request new data."""

    def __init__(self, runs: RunCollection) -> None:
        self._runs = runs
        self._changed = asyncio.Condition()
        self._generation = 0
        self._over = False

    async def run(self) -> None:
        """Refresh the runs until the server ends."""
        try:
            while True:
                before = self._revisions()
                try:
                    await asyncio.to_thread(self._runs.refresh)
                except Exception:  # reading may fail now and succeed later
                    traceback.print_exc()
                if self._revisions() != before:
                    await self._notify_pages()
                    # An index is being built, so continue at once.
                    await asyncio.sleep(0.05)
                else:
                    await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            self._over = True
            await self._notify_pages()

    async def _notify_pages(self) -> None:
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def _revisions(self) -> dict[str, int]:
        return {view.key: view.revision for view in self._runs.all()}

    async def events(self) -> AsyncIterator[bytes]:
        while not self._over:
            seen = self._generation
            yield b"event: moved\ndata: " + msgspec.json.encode(self._revisions()) + b"\n\n"
            while self._generation == seen and not self._over:
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await self._wait(seen)
                except TimeoutError:
                    yield b": still here\n\n"

    async def _wait(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._generation != seen or self._over)
