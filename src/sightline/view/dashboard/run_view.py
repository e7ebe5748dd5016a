"""One run, as the dashboard knows it."""

from __future__ import annotations

import math
import time
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from sightline.families import Family, load_family
from sightline.media import MediaStore
from sightline.render import Tokenizer
from sightline.run.run_dir import RunDir
from sightline.view.dashboard import queries
from sightline.view.dashboard.history import MetricsHistory
from sightline.view.dashboard.index import RefreshResult, RolloutIndex

SILENT_AFTER_S = 120.0
"""A run that has written nothing for so long, and has not finished, is said to be silent."""
_FILES_PER_REFRESH = 8
_IMAGES_PER_REFRESH = 5000


class RunView:
    def __init__(self, key: str, run_dir: RunDir) -> None:
        self.key = key
        self.run_dir = run_dir
        self.history = MetricsHistory(run_dir.metrics)
        self.index = RolloutIndex(run_dir)
        self.revision = 0
        """Grows with whatever the run has written."""
        self.files_left = 0
        """Of traces, that the index has yet to read."""
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
            self.__dict__.pop("store", None)
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
        """Until the index lacks nothing."""
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
        for digest in [*new, *self.missing][:_IMAGES_PER_REFRESH]:
            self.missing.pop(digest, None)
            if self.store.has(digest):
                self._present.add(digest)
            else:
                self.missing[digest] = None
        return len(self.missing) != before

    # --- settings, and what they name

    @property
    def settings_text(self) -> str:
        try:
            return self.run_dir.config.read_text(errors="replace")
        except OSError:
            return ""

    @property
    def settings(self) -> dict[str, Any]:
        """Sections of the run file; empty where it is missing or damaged."""
        try:
            return tomllib.loads(self.settings_text)
        except tomllib.TOMLDecodeError:
            return {}

    def _setting(self, section: str, name: str) -> str:
        table = self.settings.get(section)
        return str(table.get(name) or "") if isinstance(table, dict) else ""

    @cached_property
    def store(self) -> MediaStore:
        root = self._setting("media", "root")
        return MediaStore(self.run_dir.media, fallback_roots=[root] if root else [])

    @cached_property
    def checkpoint(self) -> Path | None:
        """Where the tokenizer is: what the run started from, or what it left."""
        named = self._setting("model", "path")
        around = [Path(named), self.run_dir.path.resolve().parent.parent / named] if named else []
        for path in (*around, self.run_dir.checkpoints / "final"):
            if (path / "tokenizer.json").is_file():
                return path
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where the checkpoint is not at hand: tokens then show as their ids."""
        if self.checkpoint is None:
            return None
        try:
            return Tokenizer(self.checkpoint)
        except Exception:  # the library raises this very class for a file that it cannot read
            return None

    @cached_property
    def family(self) -> Family | None:
        """None where the checkpoint is not at hand, or is of a family that is not installed."""
        if self.checkpoint is None:
            return None
        table = self.settings.get("model") or {}
        named = {k: table[k] for k in ("min_pixels", "max_pixels") if table.get(k) is not None}
        try:
            return load_family(self.checkpoint, **named)
        except Exception:  # a family outside this package may raise anything
            return None

    # --- what it is, in a few words

    @property
    def state(self) -> str:
        """live, finished, stopped or silent."""
        summary = self._summary()
        if summary is not None:
            return "stopped" if summary.get("stopped_by") else "finished"
        sft = self.history.newest("sft")
        if sft and self.history.last_step >= sft.get("steps_total", math.inf):
            return "finished"
        if time.time() - self._last_write_time() < SILENT_AFTER_S:
            return "live"
        return "silent"

    def _summary(self) -> dict[str, Any] | None:
        """The written one, unless the run has gone on since."""
        try:
            if self.run_dir.summary.stat().st_mtime >= self.run_dir.metrics.stat().st_mtime:
                return msgspec.json.decode(self.run_dir.summary.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            pass
        return None

    def _last_write_time(self) -> float:
        try:
            return self.run_dir.metrics.stat().st_mtime
        except OSError:
            return 0.0

    def problems(self) -> list[str]:
        found = [] if self.settings else ["config.toml is missing, or cannot be read"]
        if not self.run_dir.metrics.is_file():
            found.append("metrics.jsonl is missing")
        found += self.history.problems(self.state == "live")
        with self.index.connect_readonly() as connection:
            found += queries.list_problems(connection)
        if self.missing:
            found.append(f"{len(self.missing)} images are in no store")
        if self.checkpoint is None:
            found.append("the checkpoint is not at hand: tokens show as their ids")
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
            "env": self._setting("env", "name"),
            "problems": self.problems(),
        }


def _log_sizes(folder: Path) -> tuple[tuple[str, int], ...]:
    """Of the logs in it."""
    try:
        return tuple(sorted((log.name, log.stat().st_size) for log in folder.glob("*.log")))
    except OSError:  # one has just gone
        return ()
