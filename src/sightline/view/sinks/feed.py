"""Follow a run and feed its sinks, one after the other.

`sinks/NAME/position` holds the offset in `metrics.jsonl` up to which a sink has received events.
"""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from PIL.Image import Image

from sightline.config import LoggingConfig
from sightline.errors import ConfigError, MediaError, SightlineError
from sightline.media import MediaStore
from sightline.media.object_remote import ObjectRemote
from sightline.media.remote import DEADLINE_S, TIMEOUT_S
from sightline.regular_file import read_text
from sightline.run.run_dir import RunDir
from sightline.trace.codec import read_records
from sightline.view.dashboard import trace_files
from sightline.view.dashboard.history import STEP_EVENT_KINDS, flatten_numbers
from sightline.view.dashboard.thumbnails import open_reduced
from sightline.view.events import EventTail
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.view.run_status import RUNNING, find_launcher, find_state
from sightline.view.sinks import PROBLEM_PREFIX, SINKS, RolloutRow, RunIdentity, Sink, check_sinks
from sightline.wire.file import write_atomic

UPLOAD = "samples"
"""Name of the sink that uploads parquet files."""
NUM_SAMPLES = 8
"""Maximum number of rollouts per table."""
NUM_THUMBNAILS = 4
"""Maximum number of images per rollout."""
THUMBNAIL_SIDE = 192
MAX_CHARS = 2000
POLL_INTERVAL_S = 1.0


def feed_run(path: Path, config: LoggingConfig, follow: bool) -> None:
    """Feed the sinks of `config`, print the problems, and exit the process.

    Ends when everything is read or, with `follow`, when the run ends or at a signal.
    """
    run_dir = get_run_dir(path)
    check_sinks(config.sinks)
    if not config.sinks and not config.upload_samples_to:
        raise ConfigError("no sink given", "pass one with --to, or set --upload-samples-to")
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

    def is_over() -> bool:
        if stop.is_set() or not follow:
            return True
        return find_state(RunFiles(run_dir), find_launcher(run_dir)).name != RUNNING

    factories = build_factories(config, run_dir)
    problems = feed_sinks(run_dir, factories, config.samples_every, is_over)
    for name in factories:
        problem = problems.get(name)
        print(f"{PROBLEM_PREFIX}{name}: {problem}" if problem else f"{name}: fed", flush=True)
    # Do not wait for threads of sinks that hang.
    os._exit(1 if problems else 0)


def build_factories(config: LoggingConfig, run_dir: RunDir) -> dict[str, Callable[[], Sink]]:
    folder = run_dir.sinks
    folder.mkdir(exist_ok=True)
    id_file = folder / "run_id"
    if not id_file.is_file():
        write_atomic(id_file, secrets.token_hex(4).encode())
    name, settings = run_dir.path.resolve().name, RunFiles(run_dir).settings
    identity = RunIdentity(name, f"{name}-{read_text(id_file).strip()}", settings)

    def build(name: str) -> Sink:
        module = importlib.import_module(f"sightline.view.sinks.{name}")
        sink: Sink = getattr(module, SINKS[name])(folder, identity, config.wandb_offline)
        return sink

    factories: dict[str, Callable[[], Sink]] = {n: partial(build, n) for n in config.sinks}
    if config.upload_samples_to:
        factories[UPLOAD] = partial(_SampleUpload, run_dir, config.upload_samples_to, identity)
    return factories


class _SampleUpload:
    """Uploads `samples/step_N.parquet` to an object store, while the run goes on."""

    def __init__(self, run_dir: RunDir, address: str, run: RunIdentity) -> None:
        self._run_dir, self._folder = run_dir, run.unique_name
        self._remote = ObjectRemote(address, TIMEOUT_S, DEADLINE_S)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Ignore metrics: only samples are uploaded."""

    def samples(self, step: int, samples: list[RolloutRow]) -> None:
        from sightline.view.parquet_export import export_samples

        for name, _ in export_samples(self._run_dir, [step]):
            self._remote.upload(f"{self._folder}/{name}", self._run_dir.samples / name)

    def close(self) -> None:
        """Do nothing: every upload has ended."""


class _SinkFeeder:
    """A sink with its position in the run's events."""

    def __init__(self, run_dir: RunDir, name: str, build: Callable[[], Sink]) -> None:
        self._position_file = run_dir.sinks / name / "position"
        self._start = 0
        if self._position_file.is_file():
            self._start = int(read_text(self._position_file))
        self._tail = EventTail(run_dir.metrics, self._start)
        self._sink = build()

    def feed(self, run_dir: RunDir, store: MediaStore, samples_every: int) -> None:
        """Send new events."""
        events = self._tail.read()
        for event in events:
            if event.kind in STEP_EVENT_KINDS or event.kind == "eval":
                prefix = f"{event.kind}." if event.kind in ("eval", "probe", "sft_eval") else ""
                self._sink.numbers(event.step, flatten_numbers(event.values, prefix))
            if event.kind == "step" and samples_every and event.step % samples_every == 0:
                self._sink.samples(event.step, build_sample_table(run_dir, store, event.step))
        if events:
            self._save_position(self._tail.offset)

    def close(self) -> None:
        try:
            self._sink.close()
        except Exception:  # some entries may not have been saved
            self._save_position(self._start)
            raise

    def _save_position(self, offset: int) -> None:
        self._position_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._position_file, str(offset).encode())


def feed_sinks(
    run_dir: RunDir,
    sinks: dict[str, Callable[[], Sink]],
    samples_every: int,
    is_over: Callable[[], bool],
) -> dict[str, str]:
    """Feed the sinks until the run is over. Return the problem of each failed sink.

    A failed sink gets no more events. The next call continues where it failed.
    """
    problems: dict[str, str] = {}
    feeders: dict[str, _SinkFeeder] = {}
    store = RunFiles(run_dir).open_store()
    for name, build in sinks.items():
        with _record_problem(problems, name):
            feeders[name] = _SinkFeeder(run_dir, name, build)
    over = False
    while not over:
        # Check before reading, so that everything written until then is read.
        over = is_over()
        for name in feeders.keys() - problems.keys():
            with _record_problem(problems, name):
                feeders[name].feed(run_dir, store, samples_every)
        time.sleep(0.0 if over else POLL_INTERVAL_S)
    for name in feeders.keys() - problems.keys():
        with _record_problem(problems, name):
            feeders[name].close()
    return problems


@contextmanager
def _record_problem(problems: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # third-party code may raise anything
        problems[name] = f"{type(error).__name__}: {error}"


def build_sample_table(run_dir: RunDir, store: MediaStore, step: int) -> list[RolloutRow]:
    """Return the first rollouts of some groups, with reduced copies of their images."""
    rows: list[RolloutRow] = []
    groups: set[str] = set()
    file = run_dir.traces_of(step)
    verdicts = trace_files.read_verdicts(run_dir, [step]).get(step, {})
    try:
        for record in read_records(file):
            if isinstance(record, SightlineError) or record.trace.group_id in groups:
                continue
            trace = record.trace
            groups.add(trace.group_id)
            text = "\n".join(f"{node.message.role}: {node.message.text}" for node in trace.nodes)
            slots = (slot for node in trace.nodes for slot in node.slots)
            digests = list(dict.fromkeys(slot.item.ref.digest for slot in slots))
            thumbs = [_find_thumbnail(store, digest) for digest in digests[:NUM_THUMBNAILS]]
            images = tuple(thumb for thumb in thumbs if thumb is not None)
            verdict = verdicts.get(trace.id, "")
            rows.append(RolloutRow(trace.id, verdict, trace.reward, text[:MAX_CHARS], images))
            if len(rows) == NUM_SAMPLES:
                break
    except (OSError, SightlineError):
        pass  # return the rows so far
    return rows


def _find_thumbnail(store: MediaStore, digest: str) -> Image | None:
    try:
        return open_reduced(store, digest, THUMBNAIL_SIDE)
    except MediaError:
        return None
