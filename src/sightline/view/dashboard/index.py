"""An SQLite index of a run's rollouts and images, so that showing a page reads only that page.

    traces/step_N ──┐
    verdicts.jsonl ─┼──> refresh ──> view/index.sqlite
    scores/step_N ──┘

A file is read again when its size or time changes. The newest steps come first, with one
transaction per file. Several processes may refresh an index. It can be removed at any time.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sightline.algo.mismatch import StepMismatch, measure_mismatch
from sightline.errors import SightlineError
from sightline.regular_file import read_bytes, read_text
from sightline.run.run_dir import RunDir
from sightline.trace import Trace
from sightline.trace.codec import TraceRecord, read_records
from sightline.view.dashboard import trace_files
from sightline.view.fenced_run_dir import list_files
from sightline.wire.micro_batch import StepScores

T = TypeVar("T")
SCHEMA_VERSION = 5
"""Version of `schema.sql`. Older indexes are rebuilt."""
BUSY_TIMEOUT_S = 30.0
UNSTORABLE = (OverflowError, sqlite3.IntegrityError)
"""Exceptions for values that SQLite cannot store: integers over 64 bits, and NaN."""

IndexedTraces = dict[str, tuple[int, Trace]]
"""A file's traces by id, each with its rollout's id."""


class RolloutIndex:
    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._refresh_lock = threading.Lock()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.files_left = 0
        """Number of trace files that are not indexed yet."""
        self.path = self._open()

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    @contextmanager
    def connect_readonly(self) -> Iterator[sqlite3.Connection]:
        with self._connect() as connection:
            connection.execute("PRAGMA query_only = 1")
            yield connection

    def query(self, find: Callable[..., T], *args: Any) -> T:
        """Call a function of `queries` with a connection."""
        with self.connect_readonly() as connection:
            return find(connection, *args)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        # The index need not survive a crash, because it can be rebuilt.
        connection.execute("PRAGMA synchronous = OFF")
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all writes in this context, or none."""
        with self._connect() as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection

    def _open(self) -> Path:
        """Open the index in the run directory, or in a temporary folder if that is read-only."""
        path = self._run_dir.view / "index.sqlite"
        try:
            path.parent.mkdir(exist_ok=True)
            for file in path.parent.iterdir():
                if file.is_symlink():  # SQLite would write through it
                    raise OSError(f"{file} is a link")
            return self._prepare(path)
        except (OSError, sqlite3.DatabaseError):
            self._scratch = tempfile.TemporaryDirectory(prefix="sightline-view-")
            return self._prepare(Path(self._scratch.name) / "index.sqlite")

    def _prepare(self, path: Path) -> Path:
        self.path = path
        try:
            self._make_tables()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            # The file is damaged or not a database. The index can be rebuilt from the run.
            path.unlink()
            self._make_tables()
        return path

    def _make_tables(self) -> None:
        with self._connect() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        with self._transaction() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == SCHEMA_VERSION:
                return
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            for (name,) in tables.fetchall():
                connection.execute(f'DROP TABLE "{name}"')
            for statement in read_text(Path(__file__).with_name("schema.sql")).split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def refresh(self, max_files: int = 1 << 30) -> bool:
        """Index new data, but at most `max_files` trace files. Return whether data was new."""
        with self._refresh_lock:
            stale, removed = self._compare_files()
            chosen = stale[:max_files]
            steps = {trace_files.find_step(name) for name, _ in chosen}
            # The run writes a step's verdicts before its traces.
            verdicts = trace_files.read_verdicts(self._run_dir, steps) if chosen else {}
            self.files_left = len(stale)
            for name, stat in chosen:
                self._index_file(name, stat, verdicts.get(trace_files.find_step(name), {}))
                self.files_left -= 1
            for name in removed:
                with self._transaction() as connection:
                    _remove_file(connection, name)
            return bool(stale or removed) | self._index_scores()

    def _compare_files(self) -> tuple[list[tuple[str, os.stat_result]], set[str]]:
        """Return new and changed trace files, newest steps first, and the removed ones."""
        with self.connect_readonly() as connection:
            known = {
                row["name"]: (row["size"], row["mtime_ns"])
                for row in connection.execute("SELECT name, size, mtime_ns FROM files")
            }
        present = list_files(self._run_dir.traces, ".msgpack")
        stale = [
            (name, stat)
            for name, stat in present.items()
            if known.get(name) != (stat.st_size, stat.st_mtime_ns)
        ]
        stale.sort(key=lambda entry: (trace_files.find_step(entry[0]) or -1, entry[0]))
        return stale[::-1], known.keys() - present

    def _index_file(self, name: str, stat: os.stat_result, verdicts: trace_files.Verdicts) -> None:
        problems: list[str] = []
        traces: IndexedTraces = {}
        with self._transaction() as connection:
            _remove_file(connection, name)
            texts: dict[bytes, int] = {}
            try:
                for record in read_records(self._run_dir.traces / name):
                    if isinstance(record, SightlineError):
                        problems.append(record.problem)
                        continue
                    verdict = verdicts.get(record.trace.id)
                    connection.execute("SAVEPOINT rollout")
                    try:
                        rollout = _add_rollout(connection, record, name, verdict, texts)
                    except UNSTORABLE as error:
                        connection.execute("ROLLBACK TO rollout")
                        problems.append(f"trace {record.number}: {error}")
                        continue
                    traces[record.trace.id] = (rollout, record.trace)
            except OSError as error:
                problems.append(str(error.strerror or error))
            connection.execute(
                "INSERT INTO files VALUES (?, ?, ?, ?, ?)",
                (name, stat.st_size, stat.st_mtime_ns, len(traces), "; ".join(problems[:3])),
            )
            # If the step has trained, measure it now, while its traces are in memory.
            scores = self._run_dir.inside(f"scores/{name}")
            if trace_files.find_step(name) is not None and scores.is_file():
                stamp = _format_stamp(scores.stat(), stat.st_size, stat.st_mtime_ns)
                self._measure(connection, name, stamp, traces)

    def _index_scores(self) -> bool:
        """Measure the mismatch for steps whose traces are in the index."""
        with self.connect_readonly() as connection:
            known = {
                row["step"]: row["stamp"]
                for row in connection.execute("SELECT step, stamp FROM scored")
            }
            files = {row["name"]: row for row in connection.execute("SELECT * FROM files")}
        changed = False
        for name, stat in list_files(self._run_dir.scores, ".msgpack").items():
            step = trace_files.find_step(name)
            if step is None or name not in files:
                continue
            # The stamp covers both files, so that a replayed step is measured again.
            stamp = _format_stamp(stat, files[name]["size"], files[name]["mtime_ns"])
            if known.get(step) != stamp:
                with self._transaction() as connection:
                    changed |= self._measure(connection, name, stamp, {})
        return changed

    def _measure(
        self, connection: sqlite3.Connection, name: str, stamp: str, traces: IndexedTraces
    ) -> bool:
        """Measure a step. Return False if this must wait for files that are not indexed yet.

        `traces` are those in memory. The others are read: the step may have trained earlier ones.
        """
        problem = ""
        step = trace_files.find_step(name)
        assert step is not None
        measured = StepMismatch()
        try:
            scores = StepScores.from_bytes(read_bytes(self._run_dir.inside(f"scores/{name}")))
            missing = {origin.trace_id for origin in scores.origins} - traces.keys()
            traces = traces | self._read_traces(connection, step, missing)
            if self.files_left and missing - traces.keys():
                return False
            measured = measure_mismatch(scores, step, traces)
        except (
            SightlineError, msgspec.MsgspecError, OSError, LookupError, ValueError, OverflowError,
            TypeError,
        ) as error:  # fmt: skip
            problem = f"{error}".partition("\n")[0]
        for table in ("mismatch", "worst", "scored"):
            connection.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
        connection.execute("SAVEPOINT measured")
        try:
            _add_mismatch(connection, step, measured)
        except UNSTORABLE as error:
            connection.execute("ROLLBACK TO measured")
            problem = str(error)
        connection.execute("INSERT INTO scored VALUES (?, ?, ?)", (step, stamp, problem))
        return True

    def _read_traces(
        self, connection: sqlite3.Connection, step: int, ids: Collection[str]
    ) -> IndexedTraces:
        """Return the newest indexed traces with these ids that were played up to `step`."""
        rows = connection.execute(
            "SELECT id, trace_id, file, start, size, max(step) FROM rollouts WHERE step <= ?"
            " AND trace_id IN (SELECT value FROM json_each(?)) GROUP BY trace_id",
            (step, json.dumps(list(ids))),
        )
        return {
            row["trace_id"]: (
                row["id"],
                trace_files.read_trace(
                    self._run_dir.traces / row["file"], row["start"], row["size"]
                ),
            )
            for row in rows
        }


def _format_stamp(scores: os.stat_result, size: int, mtime_ns: int) -> str:
    return f"{scores.st_size}:{scores.st_mtime_ns}/{size}:{mtime_ns}"


def _remove_file(connection: sqlite3.Connection, name: str) -> None:
    step = trace_files.find_step(name)
    inside = "rollout IN (SELECT id FROM rollouts WHERE file = ?)"
    counts = f"SELECT count(*), digest FROM shows WHERE {inside} GROUP BY digest"
    connection.executemany(
        "UPDATE images SET num_shown = num_shown - ? WHERE digest = ?",
        connection.execute(counts, (name,)).fetchall(),
    )
    connection.execute("DELETE FROM images WHERE num_shown <= 0")
    connection.execute(f"DELETE FROM says WHERE {inside}", (name,))
    connection.execute(f"DELETE FROM shows WHERE {inside}", (name,))
    connection.execute("DELETE FROM rollouts WHERE file = ?", (name,))
    connection.execute("DELETE FROM files WHERE name = ?", (name,))
    if step is not None:
        for table in ("mismatch", "worst", "scored"):
            connection.execute(f"DELETE FROM {table} WHERE step = ?", (step,))


def _add_rollout(
    connection: sqlite3.Connection,
    record: TraceRecord,
    file: str,
    verdict: str | None,
    texts: dict[bytes, int],
) -> int:
    """Add a rollout and return its id. `texts` caches text ids within a file."""
    row = trace_files.build_row(record, file, verdict)
    marks = ", ".join(f":{name}" for name in row)
    rollout = connection.execute(
        f"INSERT INTO rollouts ({', '.join(row)}) VALUES ({marks})", row
    ).lastrowid
    assert rollout is not None
    new_texts = trace_files.collect_texts(record.trace)
    for digest, text in new_texts.items():
        if digest not in texts:
            connection.execute(
                "INSERT OR IGNORE INTO texts (digest, text) VALUES (?, ?)", (digest, text)
            )
            at = connection.execute("SELECT id FROM texts WHERE digest = ?", (digest,)).fetchone()
            texts[digest] = at["id"]
    connection.executemany(
        "INSERT OR IGNORE INTO says VALUES (?, ?)",
        [(texts[digest], rollout) for digest in new_texts],
    )
    images = [
        (slot.item.ref, node.id, place)
        for node in record.trace.nodes
        for place, slot in enumerate(node.slots)
    ]
    connection.executemany(
        "INSERT INTO images VALUES (?, ?, ?, ?, ?, 1)"
        " ON CONFLICT (digest) DO UPDATE SET num_shown = num_shown + 1",
        [(ref.digest, ref.mime, ref.width, ref.height, ref.nbytes) for ref, _, _ in images],
    )
    connection.executemany(
        "INSERT INTO shows VALUES (?, ?, ?, ?)",
        [(ref.digest, rollout, node, place) for ref, node, place in images],
    )
    return rollout


def _add_mismatch(connection: sqlite3.Connection, step: int, measured: StepMismatch) -> None:
    connection.executemany(
        "INSERT INTO mismatch VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (step, dimension, bucket, fresh, *astuple(cell))
            for (dimension, bucket, fresh), cell in measured.cells.items()
        ],
    )
    connection.executemany(
        f"INSERT INTO worst VALUES ({', '.join('?' * 12)})",
        [(step, *astuple(token)) for token in measured.worst],
    )
    connection.executemany(
        "UPDATE rollouts SET kl = ?, worst_ratio = ?, advantage = ?,"
        " verdict = CASE verdict WHEN '' THEN 'train' ELSE verdict END WHERE id = ? AND step = ?",
        [(*numbers, rollout, step) for rollout, numbers in measured.by_rollout.items()],
    )
