"""One run in the dashboard: its files, metrics and index."""

from __future__ import annotations

import math
import re
from typing import Any

from sightline.errors import format_command
from sightline.run.run_dir import RunDir
from sightline.view.dashboard import queries
from sightline.view.dashboard.alerts import Alert, find_alerts
from sightline.view.dashboard.history import MetricsHistory
from sightline.view.dashboard.index import RolloutIndex
from sightline.view.events import find_number
from sightline.view.fenced_run_dir import FencedRunDir, list_files
from sightline.view.formatting import fixed
from sightline.view.run_files import RunFiles
from sightline.view.run_status import FAILED, FINISHED, STOPPED, RunState, find_launcher, find_state

_FILES_PER_REFRESH = 8
IMAGES_PER_REFRESH = 5000
METRICS_BYTES_PER_REFRESH = 8 * 1024**2
_NEWEST = ("loss", "eta_s", "reward", "tokens_per_s", "bad_media")
"""Metrics of the newest step in the overview."""
_TAG = re.compile(r"(?<![\w#])#(\w(?:[\w./=-]*\w)?)")


class RunView(RunFiles):
    """A run with its metrics and its index of rollouts, as far as they have been read."""

    def __init__(self, key: str, run_dir: RunDir) -> None:
        super().__init__(run_dir)
        self.key = key
        self.store = self.open_store()
        self.history = MetricsHistory(run_dir.metrics)
        self.index = RolloutIndex(run_dir)
        self.revision = 0
        """Counter that increases whenever the run changes."""
        self._last_signature: tuple[Any, ...] = ()
        self._present: set[str] = set()
        self._alerts: tuple[int, list[Alert]] = (-1, [])
        self.missing: dict[str, None] = {}
        """Digests of missing images, in the order of the last check."""

    def close(self) -> None:
        self.index.close()

    def refresh(self) -> None:
        """Read some of the run's new data."""
        self.history.path = self.run_dir.metrics
        changed = self.history.take_in(METRICS_BYTES_PER_REFRESH)
        if self.index.refresh(_FILES_PER_REFRESH):
            changed = True
            self.store = self.open_store()
        changed |= self._look_for_images()
        # Detect changes without events, such as a new summary or log line.
        logs = list_files(self.run_dir.logs, ".log")
        sizes = {name: stat.st_size for name, stat in logs.items()}
        signature = (self.state, self.notes, sizes)
        if changed or signature != self._last_signature:
            self.revision += 1
        self._last_signature = signature

    def refresh_all(self) -> None:
        """Refresh until everything is read."""
        self.refresh()
        while self.index.files_left or self.history.is_behind:
            self.refresh()

    def _look_for_images(self) -> bool:
        """Check whether some images exist, first new ones, then missing ones."""
        before = len(self.missing)
        with self.index.connect_readonly() as connection:
            rows = connection.execute("SELECT digest FROM images").fetchall()
        unseen = [row["digest"] for row in rows if row["digest"] not in self._present]
        new = [digest for digest in unseen if digest not in self.missing]
        for digest in [*new, *self.missing][:IMAGES_PER_REFRESH]:
            self.missing.pop(digest, None)
            if self.store.has(digest):
                self._present.add(digest)
            else:
                self.missing[digest] = None
        return len(self.missing) != before

    @property
    def state(self) -> str:
        """running, finished, stopped (by a person) or failed."""
        return self._find_state().name

    def _find_state(self) -> RunState:
        sft, end = self.history.newest("sft"), self.history.end
        is_trained = bool(sft) and self.history.last_step >= sft.get("steps_total", math.inf)
        # Testing the lock takes it briefly. A run with an `end` event needs no test.
        launcher = None if end is not None else find_launcher(self.run_dir)
        return find_state(self, launcher, end, is_trained)

    def describe_end(self) -> dict[str, str]:
        """Return why the run ended, and a fix, or empty strings while it is running."""
        (state, problem), end = self._find_state(), self.history.end
        fix = str(end.values.get("fix") or "") if end is not None else ""
        if state == FINISHED and (goal := self.history.goal) is not None:
            held_out = find_number(goal.values, "held_out")
            confirmed = f", held-out reward {fixed(held_out, 3)}" if held_out is not None else ""
            problem = (
                f"[run] stop_at = {goal.values.get('stop_at')} was reached at step {goal.step}: "
                f"training reward {fixed(find_number(goal.values, 'reward'), 3)}{confirmed}"
            )
        was_cut = state == STOPPED or (state == FAILED and end is None)
        if was_cut and self.history.last_step and not fix:
            command = "sft" if "sft" in self.settings else "rl"
            words = ("sightline", command, "--resume", self.run_dir.path)
            fix = f"resume with `{format_command(*words)}`"
        return {"problem": problem, "cause": _join_ends(problem), "fix": fix}

    def alerts(self) -> list[Alert]:
        """Return alerts about the metrics so far."""
        if self._alerts[0] != self.history.num_rows:
            self._alerts = (self.history.num_rows, find_alerts(self.history))
        return self._alerts[1]

    def problems(self) -> list[str]:
        problems = [] if self.settings else ["config.toml is missing, empty or unreadable"]
        if not self.run_dir.metrics.is_file():
            problems.append("metrics.jsonl is missing")
        if isinstance(self.run_dir, FencedRunDir) and (refused := self.run_dir.list_refused()):
            names = ", ".join(refused[:10])
            problems.append(f"skipped, because they are links or not regular files: {names}")
        problems += self.history.problems(self.state == "running")
        problems += self.index.query(queries.list_problems)
        if self.missing:
            problems.append(f"{len(self.missing)} images are in no store")
        if self.checkpoint is None:
            problems.append("the checkpoint was not found: tokens are shown as ids")
        return problems

    def overview(self) -> dict[str, Any]:
        newest, trained = self.history.newest("step"), self.history.newest("train")
        newest = newest or self.history.newest("sft")
        with self.index.connect_readonly() as connection:
            num = connection.execute("SELECT count(*) FROM rollouts").fetchone()[0]
            num_images = connection.execute("SELECT count(*) FROM images").fetchone()[0]
        probe, notes = self.history.probe, self.notes
        return {
            "key": self.key,
            "path": str(self.run_dir.path),
            "revision": self.revision,
            "state": self.state,
            "phase": self.history.phase,
            "end": self.describe_end(),
            "alerts": self.alerts(),
            "notes": notes,
            "tags": list(dict.fromkeys(_TAG.findall(notes))),
            "step": self.history.last_step,
            "steps_total": newest.get("steps_total")
            or find_number(self.get_section("run"), "steps"),
            **{name: newest.get(name) for name in _NEWEST},
            "elapsed_s": self.history.active_s,
            "mismatch_kl": trained.get("mismatch_kl"),
            "started": self.history.first_time,
            "last": self.history.last_time,
            "rollouts": num,
            "images": num_images,
            "files_left": self.index.files_left,
            "evals": self.history.evals,
            "dropped": dict(self.history.dropped),
            **self.history.count_failures(),
            "probe": None if probe is None else {"step": probe.step, **probe.values},
            "env": self.get_setting("env", "name"),
            "model": self.get_setting("model", "path"),
            "problems": self.problems(),
        }


def _join_ends(problem: str) -> str:
    """Shorten a problem to one line: its start and the exception at the end of a traceback."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    if len(lines) < 2:
        return problem.strip()
    begin = lines[0].removesuffix("Traceback (most recent call last):").rstrip(" :")
    return f"{begin}: {lines[-1]}" if begin else lines[-1]
