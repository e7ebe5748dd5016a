"""Follows a run and feeds its sinks, each in a thread of its own.

reading waits for: lines of metrics.jsonl           unblocked by: the run, or the end
a sink's thread waits for: its queue                unblocked by: reading
reading never waits for a sink: a full queue loses its oldest entry, which is counted
"""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sightline.errors import ConfigError, MediaError, SightlineError
from sightline.media import MediaStore
from sightline.monitor.dashboard import pictures, reading
from sightline.monitor.dashboard.history import SERIES, flat
from sightline.monitor.dashboard.run import RunView
from sightline.monitor.events import EventTail
from sightline.monitor.run_dir import RunDir
from sightline.monitor.sinks.protocol import SINKS, Sample, Sink, Thumb
from sightline.monitor.verdicts import verdicts_of

QUEUE = 1000
NUM_SAMPLES = 8
"""Rollouts in a table."""
NUM_THUMBS = 4
"""Images of one of them."""
THUMB_SIDE = 192
MOST_CHARS = 2000
LOOK_EVERY_S = 1.0
CLOSE_WITHIN_S = 20.0
"""How long a sink may take to finish once the run is over."""
SAID, FED = "sink ", "fed"
"""The last lines of the process that feeds sinks: `sink NAME: fed`, or what went wrong."""

Entry = tuple[int, dict[str, float] | list[Sample]]


@dataclass
class Feeder:
    """One sink, its queue and its thread."""

    name: str
    build: Callable[[], Sink]
    entries: queue.Queue[Entry | None] = field(default_factory=lambda: queue.Queue(QUEUE))
    lost: int = 0
    """Entries that a slow sink did not take in time, or failed at."""
    problem: str = ""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"sink-{self.name}")
        self._thread.start()

    def give(self, entry: Entry) -> None:
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
            except Exception as error:  # likewise
                self.lost += 1
                self.problem = f"{type(error).__name__}: {error}"
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # likewise
                self.problem = f"{type(error).__name__}: {error}"


def check_sinks(names: Sequence[str]) -> None:
    """Refuses a name that is none, and one whose package is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"there is no sink {name!r}", f"choose from {', '.join(SINKS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"the sink {name!r} needs the package {name}", f"pip install 'sightline[{name}]'"
            )


def builders(names: Sequence[str], run_dir: RunDir, offline: bool) -> dict[str, Callable[[], Sink]]:
    folder = run_dir.sinks

    def builder(name: str) -> Callable[[], Sink]:
        def build() -> Sink:
            folder.mkdir(exist_ok=True)
            module = importlib.import_module(f"sightline.monitor.sinks.{name}")
            made: Sink = module.build(folder, run_dir.path.resolve().name, offline)
            return made

        return build

    return {name: builder(name) for name in names}


def follow(
    run_dir: RunDir,
    sinks: dict[str, Callable[[], Sink]],
    samples_every: int,
    is_over: Callable[[], bool],
) -> list[Feeder]:
    """Feeds the sinks until the run is over and all of its lines are read."""
    feeders = [Feeder(name, build) for name, build in sinks.items()]
    tail = EventTail(run_dir.metrics)
    store = RunView("sinks", run_dir).store
    while True:
        # Looked at before reading: what was written until then is read.
        over = is_over()
        for event in tail.read():
            if event.kind in SERIES or event.kind == "eval":
                prefix = f"{event.kind}." if event.kind in ("eval", "probe") else ""
                for feeder in feeders:
                    feeder.give((event.step, flat(event.values, prefix)))
            if event.kind == "step" and samples_every and event.step % samples_every == 0:
                found = sample_table(run_dir, store, event.step)
                for feeder in feeders:
                    feeder.give((event.step, found))
        if over:
            break
        time.sleep(LOOK_EVERY_S)
    deadline = time.monotonic() + CLOSE_WITHIN_S
    for feeder in feeders:
        if not feeder.finish(max(0.1, deadline - time.monotonic())):
            feeder.problem = feeder.problem or "did not end in time"
    return feeders


def sample_table(run_dir: RunDir, store: MediaStore, step: int) -> list[Sample]:
    """The first rollouts of some groups, with small copies of their images."""
    found: list[Sample] = []
    groups: set[str] = set()
    file = run_dir.traces_of(step)
    verdicts = verdicts_of(run_dir, file.stem)
    try:
        for record in reading.records(file):
            if isinstance(record, str) or record.trace.group_id in groups:
                continue
            trace = record.trace
            groups.add(trace.group_id)
            said = "\n".join(f"{node.message.role}: {node.message.text}" for node in trace.nodes)
            digests = dict.fromkeys(
                slot.item.ref.digest for node in trace.nodes for slot in node.slots
            )
            thumbs = [t for d in list(digests)[:NUM_THUMBS] if (t := _thumb(store, d)) is not None]
            found.append(
                Sample(
                    trace.id, verdicts.get(trace.id, ""), trace.reward, said[:MOST_CHARS],
                    tuple(thumbs),
                )
            )  # fmt: skip
            if len(found) == NUM_SAMPLES:
                break
    except (OSError, SightlineError):
        return found
    return found


def _thumb(store: MediaStore, digest: str) -> Thumb | None:
    try:
        return Thumb(*pictures.png(store, digest, THUMB_SIDE))
    except MediaError:
        return None
