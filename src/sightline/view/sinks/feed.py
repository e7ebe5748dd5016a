"""Follows a run and feeds its sinks, each in a thread of its own.

reading waits for: lines of metrics.jsonl           unblocked by: the run, or the end
a sink's thread waits for: its queue                unblocked by: reading
reading never waits for a sink: a full queue loses its oldest entry, which is counted
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sightline.errors import MediaError, SightlineError
from sightline.media import MediaStore
from sightline.run.run_dir import RunDir
from sightline.view.dashboard import thumbnails, trace_files
from sightline.view.dashboard.history import STEP_EVENT_KINDS, flatten_numbers
from sightline.view.events import EventTail
from sightline.view.run_files import RunFiles
from sightline.view.sinks.protocol import CLOSE_TIMEOUT_S, RolloutRow, Sink, Thumbnail
from sightline.view.verdicts import read_verdicts

QUEUE_SIZE = 1000
NUM_SAMPLES = 8
"""Rollouts in a table."""
NUM_THUMBNAILS = 4
"""Images of one rollout."""
THUMBNAIL_SIDE = 192
MAX_CHARS = 2000
POLL_INTERVAL_S = 1.0

SinkEntry = tuple[int, dict[str, float] | list[RolloutRow]]


@dataclass
class SinkFeeder:
    """One sink, its queue and its thread."""

    name: str
    build: Callable[[], Sink]
    entries: queue.Queue[SinkEntry | None] = field(default_factory=lambda: queue.Queue(QUEUE_SIZE))
    lost: int = 0
    """Entries that a slow sink did not take in time, or failed at."""
    problem: str = ""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"sink-{self.name}")
        self._thread.start()

    def enqueue(self, entry: SinkEntry) -> None:
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
        """Whether the sink has ended in time."""
        try:
            self.entries.put(None, timeout=within_s)
        except queue.Full:
            return False
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            sink = self.build()
        except Exception as error:  # a library of others, which may raise anything
            traceback.print_exc()
            self.problem = f"{type(error).__name__}: {error}"
            sink = None
        while (entry := self.entries.get()) is not None:
            if sink is None:
                self.lost += 1
                continue
            step, what = entry
            try:
                if isinstance(what, dict):
                    sink.numbers(step, what)
                else:
                    sink.samples(step, what)
            except Exception as error:  # a sink may fail, and costs only itself
                self.lost += 1
                self.problem = f"{type(error).__name__}: {error}"
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # a sink may fail, and costs only itself
                self.problem = f"{type(error).__name__}: {error}"


def build_sink_factories(
    names: Sequence[str], run_dir: RunDir, offline: bool
) -> dict[str, Callable[[], Sink]]:
    folder = run_dir.sinks

    def builder(name: str) -> Callable[[], Sink]:
        def build() -> Sink:
            folder.mkdir(exist_ok=True)
            module = importlib.import_module(f"sightline.view.sinks.{name}")
            made: Sink = module.build(folder, run_dir.path.resolve().name, offline)
            return made

        return build

    return {name: builder(name) for name in names}


def feed_sinks(
    run_dir: RunDir,
    sinks: dict[str, Callable[[], Sink]],
    samples_every: int,
    is_over: Callable[[], bool],
    close_timeout_s: float = CLOSE_TIMEOUT_S,
) -> list[SinkFeeder]:
    """Feeds the sinks until the run is over and all of its lines are read."""
    feeders = [SinkFeeder(name, build) for name, build in sinks.items()]
    tail = EventTail(run_dir.metrics)
    store = RunFiles(run_dir).open_store()
    while True:
        # Looked at before reading: what was written until then is read.
        over = is_over()
        for event in tail.read():
            if event.kind in STEP_EVENT_KINDS or event.kind == "eval":
                prefix = f"{event.kind}." if event.kind in ("eval", "probe", "sft_eval") else ""
                for feeder in feeders:
                    feeder.enqueue((event.step, flatten_numbers(event.values, prefix)))
            if event.kind == "step" and samples_every and event.step % samples_every == 0:
                found = build_sample_table(run_dir, store, event.step)
                for feeder in feeders:
                    feeder.enqueue((event.step, found))
        if over:
            break
        time.sleep(POLL_INTERVAL_S)
    deadline = time.monotonic() + close_timeout_s
    for feeder in feeders:
        if not feeder.finish(max(0.1, deadline - time.monotonic())):
            feeder.problem = feeder.problem or "did not end in time"
    return feeders


def build_sample_table(run_dir: RunDir, store: MediaStore, step: int) -> list[RolloutRow]:
    """The first rollouts of some groups, with small copies of their images."""
    found: list[RolloutRow] = []
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
            found.append(
                RolloutRow(
                    trace.id, verdicts.get(trace.id, ""), trace.reward, text[:MAX_CHARS],
                    tuple(thumbs),
                )
            )  # fmt: skip
            if len(found) == NUM_SAMPLES:
                break
    except (OSError, SightlineError):
        return found
    return found


def _find_thumbnail(store: MediaStore, digest: str) -> Thumbnail | None:
    try:
        return Thumbnail(*thumbnails.make_png_thumbnail(store, digest, THUMBNAIL_SIDE))
    except MediaError:
        return None
