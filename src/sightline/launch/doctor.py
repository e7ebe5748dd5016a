"""What is wrong with a run that broke, what of it is safe, and what to type. Changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from sightline.config import RunFile, SftFile, load_config
from sightline.errors import SightlineError
from sightline.launch.claim import MIN_SECRET_CHARS, check_model_unchanged
from sightline.launch.preflight import SPARE_BYTES
from sightline.launch.process_watch import find_marked
from sightline.media import MediaRef, MediaStore, open_store
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.run_state import RunState, read_progress
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.trainer.checkpoint import CheckpointStore, ResumePoint
from sightline.trainer.ledger import read_ledger
from sightline.view.events import EventTail
from sightline.view.run_status import FAILED, FINISHED, RUNNING, TRIAL, RunStatus, get_status
from sightline.wire.file import SUMS, find_changed_files, read_lines
from sightline.wire.sample import Batch, digest_batch
from sightline.wire.weights import read_history


class Problem(NamedTuple):
    problem: str
    fix: str
    blocks: bool = True
    """Whether a resume would be refused."""


@dataclass
class Diagnosis:
    state: str
    problems: list[Problem] = field(default_factory=list)
    safe: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    """What to type, each with what it does."""

    def run(self, check: Callable[[], str | None]) -> None:
        """Takes down what `check` says is safe, or what it refuses."""
        try:
            found = check()
        except SightlineError as error:
            self.problems.append(Problem(error.problem, error.fix))
        else:
            self.safe += [found] if found else []


def examine_run(run_dir: RunDir) -> Diagnosis:
    """Looks at every file that a resume would read, at the results, and at what still runs."""
    status = get_status(run_dir)
    found = Diagnosis(f"{status.state} at step {status.step} of {status.steps_total or '?'}")
    launcher = status.launcher
    is_stopped = launcher is not None and launcher.is_stopped
    if launcher is not None and is_stopped:
        problem = f"a signal has stopped the launcher, process {launcher.pid}: nothing is watched"
        found.problems.append(Problem(problem, f"kill -CONT {launcher.pid}", blocks=False))
    if status.state == FAILED:
        fix = f"see {run_dir.logs}; what to type is below"
        found.problems.append(Problem(status.cause, fix, blocks=False))
    if special := sorted(_find_special_files(run_dir.path)):
        fix = "remove it; nothing else was read"
        found.problems += [Problem(f"{path} is no regular file", fix) for path in special]
        return found
    config: list[RunFile | SftFile] = []

    def check_config() -> None:
        is_sft = status.command == "sft"
        config.append(load_config(SftFile if is_sft else RunFile, run_dir.config))  # type: ignore[arg-type]

    def check_model() -> str:
        check_model_unchanged(run_dir, Path(config[0].model.path))
        return f"the model in {config[0].model.path}"

    found.run(check_config)
    if config:
        found.run(check_model)
    checkpoints = CheckpointStore(run_dir.checkpoints, keep=1).choose()
    if checkpoints.path is not None:
        found.safe.append(f"the checkpoint of step {checkpoints.step}")
    if status.command == "rl":
        options = config[0].media.store_options() if config else {}
        root = (config and config[0].media.root) or run_dir.media
        _examine_steps(run_dir, found, checkpoints, open_store(root, **options))
    else:
        fix = f"a resume goes on from step {checkpoints.step}"
        found.problems += [Problem(one, fix, blocks=False) for one in checkpoints.refused]
    if status.command != TRIAL:
        named = "\n".join(one.problem for one in found.problems)
        found.problems += _find_damaged_records(run_dir, status, named)
    if status.state != RUNNING:
        _examine_export(status, found, checkpoints.step)
    found.problems += _find_surroundings(run_dir, status)
    if launcher is not None and is_stopped:
        found.commands.append(f"kill -CONT {launcher.pid}    # lets the launcher go on")
    elif status.state == RUNNING:
        found.commands.append(f"sightline status {run_dir.path}    # it goes on")
    elif status.state != FINISHED and not any(problem.blocks for problem in found.problems):
        found.commands.append(f"{status.resume_command}    # goes on after step {checkpoints.step}")
    if checkpoints.path is not None:
        found.commands.append(
            f"sightline export {run_dir.path} DIR    # the model of step {checkpoints.step}"
        )
    return found


def _find_special_files(folder: Path) -> Iterator[Path]:
    """Pipes, sockets and devices, which a reader may wait for without end; or links to them."""
    with suppress(OSError), os.scandir(folder) as entries:  # whoever reads there says so
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _find_special_files(Path(entry.path))
            elif not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path):
                yield Path(entry.path)


def _examine_steps(
    run_dir: RunDir, found: Diagnosis, checkpoints: ResumePoint, store: MediaStore
) -> None:
    """What the orchestrator reads beyond the trainer's checkpoint, and the records of steps."""
    step, before = checkpoints.step, len(found.problems)
    waiting: set[MediaRef] = set()
    lost: list[int] = []
    """Steps whose batches a resume from an earlier checkpoint would need."""

    def check_batches() -> str:
        run_state = RunState(run_dir, read_progress(run_dir))
        if checkpoints.refused:
            steps = range(step + 1, run_state.progress.step + 1)
            lost.extend(one for one in steps if not run_dir.batch(one).is_file())
        if lost:
            return ""
        announced = run_state.announcements_after(step)
        batches = [Batch.from_bytes(ready.data) for ready in announced]
        items = (i for batch in batches for sample in batch.samples for i in sample.items)
        waiting.update(ref for item in items for ref in item.refs)
        for ref in waiting:
            store.get(ref)
        return f"{len(batches)} batches that wait, with their {len(waiting)} images"

    def check_best() -> str:
        run_state = RunState(run_dir, read_progress(run_dir))
        best = BestCheckpoint(Path(), run_dir.checkpoints / "best", run_state)
        if problem := best.find_problem():
            fix = "a resume makes a new one at the next evaluation"
            found.problems.append(Problem(problem, fix, blocks=False))
        elif run_state.progress.best_step:
            return f"the best checkpoint, of step {run_state.progress.best_step}"
        return ""

    found.run(check_batches)
    if len(found.problems) == before:
        found.run(check_best)
    fix = f"a resume goes on from step {step}, with the batches that wait"
    if lost:
        fix = (
            f"put it back from a copy: a resume from step {step} needs the batch of step {lost[0]}"
        )
        fix += ", which went when a later checkpoint covered it"
    found.problems += [Problem(one, fix, blocks=bool(lost)) for one in checkpoints.refused]
    found.run(lambda: f"the ledger of {len(read_ledger(run_dir.ledger, step))} steps")
    found.run(lambda: f"the history of {len(read_history(run_dir.weights))} versions")
    fix = "put it back from a copy; no resume reads it"
    problems = _find_damaged_traces(run_dir, store, waiting)
    found.problems += [Problem(one, fix, blocks=False) for one in problems]


def _find_damaged_traces(
    run_dir: RunDir, store: MediaStore, checked: set[MediaRef]
) -> Iterator[str]:
    """Traces that are gone, or not what `verdicts.jsonl` says, and the images that they show and
    the store has no more; all of them. What `sightline prune` removed is not missed."""
    by_step: dict[int, str] = {}
    for number, line in enumerate(read_lines(run_dir.verdicts), 1):
        try:
            values = json.loads(line)
            by_step[int(values["step"])] = values.get("traces", "")
        except (ValueError, TypeError, KeyError, OverflowError):
            yield f"{run_dir.verdicts}, line {number}, is damaged"
    evals: list[str] = []
    with suppress(SightlineError):  # a progress that is damaged is a problem of its own
        progress = read_progress(run_dir)
        evals = list(progress.evals)
        # The step that a kill cut short has verdicts before it has traces; it is made again.
        by_step = {step: digest for step, digest in by_step.items() if step <= progress.step}
    digests = {run_dir.traces_of(step): digest for step, digest in by_step.items()}
    digests |= {run_dir.eval_traces(name): "" for name in evals}
    pruned = {run_dir.inside(line.decode(errors="replace")) for line in read_lines(run_dir.pruned)}
    if gone := [file for file in digests if not file.is_file() and file not in pruned]:
        yield f"{len(gone)} of {len(digests)} files of traces are gone, the first {gone[0]}"
    shown: dict[MediaRef, Path] = {}
    console = Console(stderr=True)
    files = [file for file in digests if file.is_file()]
    for file in track(
        files, "traces", console=console, transient=True, disable=not console.is_terminal
    ):
        if digests[file] and digest_batch(file.read_bytes()) != digests[file]:
            yield f"{file} is damaged: it is not what was written"
            continue
        try:
            for trace in read_traces(file):
                slots = (slot for node in trace.nodes for slot in node.slots)
                shown |= dict.fromkeys((ref for s in slots for ref in s.item.refs), file)
        except SightlineError as error:
            yield f"{file} is damaged: {error.problem}"
    lost = [ref for ref in shown.keys() - checked if not store.has(ref)]
    if lost:
        first = min(lost, key=lambda ref: shown[ref])
        words = f"the first {first.digest[:12]} of {shown[first]}"
        yield f"{len(lost)} of {len(shown)} images of traces are not in {store.root}, {words}"


def _find_damaged_records(run_dir: RunDir, status: RunStatus, named: str) -> Iterator[Problem]:
    """What is wrong with files that a run goes on without, and that is not `named` already."""
    shapes = {run_dir.id_file: "[0-9a-f]{16}", run_dir.secret: rf"\S{{{MIN_SECRET_CHARS},}}"}
    for path, shape in shapes.items():
        if str(path) in named:
            continue
        if not path.is_file():
            problem = f"{path} is gone, or the run is of an earlier version"
            yield Problem(problem, "a resume makes a new one", blocks=False)
        elif not re.fullmatch(shape, path.read_text(errors="replace").strip()):
            fix = "put it back from a copy, or remove it: a resume then makes a new one"
            yield Problem(f"{path} is damaged: it is not as a run writes it", fix)
    if run_dir.secret.is_file() and run_dir.secret.stat().st_mode & 0o077:
        problem = f"others can read {run_dir.secret}"
        yield Problem(problem, f"chmod 600 {run_dir.secret}", blocks=False)
    fix = "put it back from a copy; a resume goes on without"
    tail = EventTail(run_dir.metrics)
    events = tail.read()
    if status.step and not run_dir.metrics.exists() and str(run_dir.metrics) not in named:
        yield Problem(f"{run_dir.metrics} is gone, and with it the curves", fix, blocks=False)
    if tail.num_invalid_lines:
        problem = f"{run_dir.metrics} is damaged: {tail.num_invalid_lines} lines are no events"
        yield Problem(problem, fix, blocks=False)
    has_ended = status.state != RUNNING and bool(events) and events[-1].kind == "end"
    if has_ended and not run_dir.summary.is_file():
        yield Problem(f"{run_dir.summary} is gone", fix, blocks=False)


def _examine_export(status: RunStatus, found: Diagnosis, step: int) -> None:
    """The trained model, by the digests beside it."""
    folder, run = status.export_dir, status.run_dir.path
    fix = "put it back from a copy"
    if step:
        fix += f", or `sightline export {run} {folder} --force`: the model of step {step}"
    problems = []
    if folder.is_dir():
        try:
            problems = find_changed_files(folder)
        except OSError:
            problems = [f"{folder / SUMS} is gone, or the model is of an earlier version"]
        found.safe += [] if problems else [f"the trained model in {folder}"]
    elif status.state == FINISHED and status.command != TRIAL:
        problems = [f"the trained model in {folder} is gone"]
    found.problems += [Problem(one, fix, blocks=False) for one in problems]


def _find_surroundings(run_dir: RunDir, status: RunStatus) -> Iterator[Problem]:
    """A full disk, and processes that outlived their launcher."""
    free = shutil.disk_usage(run_dir.path).free
    if free < SPARE_BYTES:
        fix = "free some space: `sightline prune` removes the records of old runs"
        yield Problem(f"the disk of {run_dir.path} has {free / 1e9:.2f} GB free", fix)
    if status.launcher is not None:
        return
    orphans: dict[str, list[int]] = defaultdict(list)
    for pid, name in sorted(find_marked(run_dir.path).items()):
        orphans[name].append(pid)
    for name, pids in orphans.items():
        problem = f"{len(pids)} processes of {name}, or started by it, run without their launcher"
        fix = f"kill -9 {' '.join(map(str, pids))}    # a resume does that, too"
        yield Problem(problem, fix, blocks=False)
