"""Follow a run and feed its sinks, each in its own thread.

The reader waits for lines of metrics.jsonl. A sink's thread waits for its queue. The reader never
waits for a sink: a full queue drops and counts its oldest entry.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sightline.errors import ConfigError, MediaError, SightlineError
from sightline.media import MediaStore
from sightline.run.run_dir import RunDir
from sightline.view.dashboard import thumbnails, trace_files
from sightline.view.dashboard.history import STEP_EVENT_KINDS, flatten_numbers
from sightline.view.events import EventTail
from sightline.view.run_files import RunFiles
from sightline.view.sinks.protocol import CLOSE_TIMEOUT_S, RolloutRow, RunIdentity, Sink, Thumbnail
from sightline.view.verdicts import read_verdicts
from sightline.wire.file import read_lines, write_atomic

QUEUE_SIZE = 1000
NUM_SAMPLES = 8
"""Rollouts per table."""
NUM_THUMBNAILS = 4
"""Images per rollout."""
THUMBNAIL_SIDE = 192
MAX_CHARS = 2000
POLL_INTERVAL_S = 1.0

SinkEntry = tuple[str, int, dict[str, float] | list[RolloutRow]]
"""A name that is the same in every reading of the run, the step, and the data."""


class DeliveryLog:
    """The entries that a sink has received, so that feeding it again adds only new ones."""

    def __init__(self, path: Path) -> None:
        """Open the log; raise if another process feeds the sink."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ConfigError(
                f"another process feeds this sink and locks {path}", "wait until it ends"
            ) from None
        self._start = os.fstat(self._file).st_size
        self.names = {line.decode(errors="replace") for line in read_lines(path)}
        self.num_before = len(self.names)

    def add(self, name: str) -> None:
        os.write(self._file, name.encode() + b"\n")

    def forget(self) -> None:
        """Remove the entries that were added since it was opened."""
        os.ftruncate(self._file, self._start)

    def close(self) -> None:
        os.close(self._file)


@dataclass
class SinkFeeder:
    """A sink with its queue and thread."""

    name: str
    build: Callable[[], Sink]
    log_path: Path
    """The path of its delivery log."""
    entries: queue.Queue[SinkEntry | None] = field(default_factory=lambda: queue.Queue(QUEUE_SIZE))
    lost: int = 0
    """Entries that were dropped because the sink was slow or failed."""
    problem: str = ""

    def __post_init__(self) -> None:
        self._log: DeliveryLog | None = None
        try:
            self._log = DeliveryLog(self.log_path)
        except ConfigError as error:
            self.problem = error.problem
        except OSError as error:
            self.problem = str(error)
        self._seen = self._log.names if self._log else set()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"sink-{self.name}")
        self._thread.start()

    @property
    def num_before(self) -> int:
        """Entries that the sink received earlier."""
        return self._log.num_before if self._log else 0

    def enqueue(self, entry: SinkEntry) -> None:
        """Queue an entry, unless the sink already has one of this name."""
        if entry[0] in self._seen:
            return
        self._seen.add(entry[0])
        while True:
            try:
                self.entries.put_nowait(entry)
                return
            except queue.Full:
                try:
                    self.entries.get_nowait()
                    self.lost += 1
                except queue.Empty:
                    continue

    def finish(self, within_s: float) -> bool:
        """Close the sink and return whether it ended in time."""
        try:
            self.entries.put(None, timeout=within_s)
        except queue.Full:
            return False
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._feed(self._build())
        finally:
            if self._log is not None:
                self._log.close()

    def _feed(self, sink: Sink | None) -> None:
        while (entry := self.entries.get()) is not None:
            if sink is None or self._log is None:
                self.lost += 1
                continue
            name, step, what = entry
            try:
                if isinstance(what, dict):
                    sink.numbers(step, what)
                else:
                    sink.samples(step, what)
                self._log.add(name)
            except Exception as error:  # third-party code may raise anything
                self.lost += 1
                self.problem = f"{type(error).__name__}: {error}"
        if sink is not None and self._log is not None:
            try:
                sink.close()
            except Exception as error:  # third-party code may raise anything
                self.problem = f"{type(error).__name__}: {error}"
                self._log.forget()  # it is unknown which entries were saved

    def _build(self) -> Sink | None:
        if self._log is None:
            return None
        try:
            return self.build()
        except Exception as error:  # third-party code may raise anything
            traceback.print_exc()
            self.problem = f"{type(error).__name__}: {error}"
            return None


def build_sink_factories(
    names: Sequence[str], run_dir: RunDir, offline: bool
) -> dict[str, Callable[[], Sink]]:
    folder = run_dir.sinks
    folder.mkdir(exist_ok=True)
    name = run_dir.path.resolve().name
    identity = RunIdentity(name, _get_run_id(folder), RunFiles(run_dir).settings)

    def builder(sink: str) -> Callable[[], Sink]:
        def build() -> Sink:
            module = importlib.import_module(f"sightline.view.sinks.{sink}")
            built: Sink = module.build(folder, identity, offline)
            return built

        return build

    return {sink: builder(sink) for sink in names}


def _get_run_id(folder: Path) -> str:
    """Return the id that is created when the run is first fed."""
    path = folder / "run_id"
    if not path.is_file():
        write_atomic(path, secrets.token_hex(4).encode())
    return path.read_text().strip()


def feed_sinks(
    run_dir: RunDir,
    sinks: dict[str, Callable[[], Sink]],
    samples_every: int,
    is_over: Callable[[], bool],
    close_timeout_s: float = CLOSE_TIMEOUT_S,
) -> list[SinkFeeder]:
    """Feed the sinks until the run is over and all lines are read."""
    feeders = [
        SinkFeeder(name, build, run_dir.sinks / name / "delivered") for name, build in sinks.items()
    ]
    tail = EventTail(run_dir.metrics)
    store = RunFiles(run_dir).open_store()
    while True:
        # Checked before reading, so that everything written until then is read.
        over = is_over()
        for event in tail.read():
            if event.kind in STEP_EVENT_KINDS or event.kind == "eval":
                prefix = f"{event.kind}." if event.kind in ("eval", "probe", "sft_eval") else ""
                name = f"{event.kind} {event.step} {event.values.get('name', '')}".rstrip()
                for feeder in feeders:
                    feeder.enqueue((name, event.step, flatten_numbers(event.values, prefix)))
            if event.kind == "step" and samples_every and event.step % samples_every == 0:
                table = build_sample_table(run_dir, store, event.step)
                for feeder in feeders:
                    feeder.enqueue((f"samples {event.step}", event.step, table))
        if over:
            break
        time.sleep(POLL_INTERVAL_S)
    deadline = time.monotonic() + close_timeout_s
    for feeder in feeders:
        if not feeder.finish(max(0.1, deadline - time.monotonic())):
            feeder.problem = feeder.problem or "did not end in time"
    return feeders


def build_sample_table(run_dir: RunDir, store: MediaStore, step: int) -> list[RolloutRow]:
    """Return the first rollouts of some groups, with reduced copies of their images."""
    rows: list[RolloutRow] = []
    groups: set[str] = set()
    file = run_dir.traces_of(step)
    verdicts = read_verdicts(run_dir, file.stem)
    try:
        for record in trace_files.read_records(file):
            if isinstance(record, str) or record.trace.group_id in groups:
                continue
            trace = record.trace
            groups.add(trace.group_id)
            text = "\n".join(f"{node.message.role}: {node.message.text}" for node in trace.nodes)
            digests = dict.fromkeys(
                slot.item.ref.digest for node in trace.nodes for slot in node.slots
            )
            thumbs = [
                t
                for d in list(digests)[:NUM_THUMBNAILS]
                if (t := _find_thumbnail(store, d)) is not None
            ]
            rows.append(
                RolloutRow(
                    trace.id, verdicts.get(trace.id, ""), trace.reward, text[:MAX_CHARS],
                    tuple(thumbs),
                )
            )  # fmt: skip
            if len(rows) == NUM_SAMPLES:
                break
    except (OSError, SightlineError):
        pass  # the rows so far
    return rows


def _find_thumbnail(store: MediaStore, digest: str) -> Thumbnail | None:
    try:
        return Thumbnail(*thumbnails.make_png_thumbnail(store, digest, THUMBNAIL_SIDE))
    except MediaError:
        return None
