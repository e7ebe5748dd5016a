"""One run, as the dashboard knows it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from sightline.run.run_dir import RunDir
from sightline.view.dashboard import queries
from sightline.view.dashboard.history import MetricsHistory
from sightline.view.dashboard.index import RefreshResult, RolloutIndex
from sightline.view.run_files import RunFiles

SILENT_AFTER_S = 120.0
"""A run that has not finished, and has written nothing for so long, is shown as silent."""
_FILES_PER_REFRESH = 8
IMAGES_PER_REFRESH = 5000


class RunView(RunFiles):
    """A run with its metrics and its index of rollouts, taken in as far as it was written."""

    def __init__(
        self, key: str, run_dir: RunDir, images_per_refresh: int = IMAGES_PER_REFRESH
    ) -> None:
        super().__init__(run_dir)
        self.key = key
        self.store = self.open_store()
        self._images_per_refresh = images_per_refresh
        self.history = MetricsHistory(run_dir.metrics)
        self.index = RolloutIndex(run_dir)
        self.revision = 0
        """Grows with whatever the run has written."""
        self.files_left = 0
        """Trace files that the index has yet to read."""
        self._last_signature: tuple[Any, ...] = ()
        self._present: set[str] = set()
        self.missing: dict[str, None] = {}
        """Digests of images that something shows and no store holds, in the order of looking."""

    def close(self) -> None:
        self.index.close()

    def refresh(self) -> bool:
        """Takes in what the run has written since; whether there was anything."""
        changed = self.history.read()
        indexed: RefreshResult = self.index.refresh(_FILES_PER_REFRESH)
        self.files_left = indexed.files_left
        if indexed.changed:
            changed = True
            self.store = self.open_store()
        changed |= self._look_for_images()
        # What the run says without an event: that it ended, and how.
        before, self._last_signature = (
            self._last_signature,
            (self.state, _log_sizes(self.run_dir.logs)),
        )
        if changed or self._last_signature != before:
            self.revision += 1
        return changed

    def refresh_all(self) -> None:
        """Refreshes until the index lacks nothing."""
        self.refresh()
        while self.files_left:
            self.refresh()

    def _look_for_images(self) -> bool:
        """Looks whether images are there, some at a time: new ones first, and those that were
        missing in turn."""
        before = len(self.missing)
        with self.index.connect_readonly() as connection:
            rows = connection.execute("SELECT digest FROM images").fetchall()
        unseen = [row["digest"] for row in rows if row["digest"] not in self._present]
        new = [digest for digest in unseen if digest not in self.missing]
        for digest in [*new, *self.missing][: self._images_per_refresh]:
            self.missing.pop(digest, None)
            if self.store.has(digest):
                self._present.add(digest)
            else:
                self.missing[digest] = None
        return len(self.missing) != before

    # --- what it is, in a few words

    @property
    def state(self) -> str:
        """live, finished, stopped or silent."""
        summary = self.find_summary()
        if summary is not None:
            return "stopped" if summary.get("stopped_by") else "finished"
        sft = self.history.newest("sft")
        if sft and self.history.last_step >= sft.get("steps_total", math.inf):
            return "finished"
        if time.time() - self._last_write_time() < SILENT_AFTER_S:
            return "live"
        return "silent"

    def _last_write_time(self) -> float:
        try:
            return self.run_dir.metrics.stat().st_mtime
        except OSError:
            return 0.0

    def problems(self) -> list[str]:
        found = [] if self.settings else ["config.toml is missing, empty, or cannot be read"]
        if not self.run_dir.metrics.is_file():
            found.append("metrics.jsonl is missing")
        found += self.history.problems(self.state == "live")
        with self.index.connect_readonly() as connection:
            found += queries.list_problems(connection)
        if self.missing:
            found.append(f"{len(self.missing)} images are in no store")
        if self.checkpoint is None:
            found.append("the checkpoint was not found: tokens show as their ids")
        return found

    def overview(self) -> dict[str, Any]:
        newest, trained = self.history.newest("step"), self.history.newest("train")
        newest = newest or self.history.newest("sft")
        with self.index.connect_readonly() as connection:
            num = connection.execute("SELECT count(*) FROM rollouts").fetchone()[0]
            shown = connection.execute("SELECT count(*) FROM images").fetchone()[0]
        probe = self.history.probe
        return {
            "key": self.key,
            "path": str(self.run_dir.path),
            "revision": self.revision,
            "state": self.state,
            "phase": self.history.phase,
            "step": self.history.last_step,
            "steps_total": newest.get("steps_total"),
            "eta_s": newest.get("eta_s"),
            "reward": newest.get("reward"),
            "mismatch_kl": trained.get("mismatch_kl"),
            "tokens_per_s": newest.get("tokens_per_s"),
            "bad_media": newest.get("bad_media"),
            "started": self.history.first_time,
            "last": self.history.last_time,
            "rollouts": num,
            "images": shown,
            "files_left": self.files_left,
            "evals": self.history.evals,
            "dropped": dict(self.history.dropped),
            "probe": None if probe is None else {"step": probe.step, **probe.values},
            "env": self.get_setting("env", "name"),
            "problems": self.problems(),
        }


def _log_sizes(folder: Path) -> tuple[tuple[str, int], ...]:
    """Name and size of each log in the folder."""
    try:
        return tuple(sorted((log.name, log.stat().st_size) for log in folder.glob("*.log")))
    except OSError:  # one has just gone
        return ()
