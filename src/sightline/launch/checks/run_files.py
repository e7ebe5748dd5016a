"""Check a run directory, for `sightline doctor`. The checks change nothing."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from sightline.config import RunFile, SftFile
from sightline.errors import SightlineError, format_command
from sightline.launch.checks import Finding
from sightline.launch.checks.machine import SPARE_BYTES
from sightline.launch.claim import MIN_SECRET_CHARS, check_model_unchanged
from sightline.launch.process_watch import find_marked
from sightline.media import MediaStore
from sightline.media.files import measure_free_space
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.run_state import RunState, read_progress
from sightline.regular_file import read_bytes, read_text
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.trainer.checkpoint import ResumePoint
from sightline.view.events import EventTail
from sightline.view.run_status import FAILED, FINISHED, PREVIEW, RUNNING, RunStatus
from sightline.wire.file import SUMS, find_changed_files, read_lines
from sightline.wire.sample import Batch, digest_batch

NUM_THREADS = 16
"""Questions to a store at the same time."""
RESTORE = "restore it from a copy"


def check_state(status: RunStatus) -> Iterator[Finding]:
    launcher = status.launcher
    if launcher is not None and launcher.is_stopped:
        problem = f"a signal has stopped the launcher, process {launcher.pid}"
        yield Finding(problem, f"kill -CONT {launcher.pid}")
    if status.state == FAILED:
        yield Finding(status.cause, f"see {status.run_dir.logs}, and the command below")


def check_file_types(run_dir: RunDir) -> Iterator[Finding]:
    """Report pipes, sockets and devices, which could block a reader forever."""
    for path in sorted(run_dir.path.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            yield Finding(f"{path} is not a regular file", "remove it. Nothing else was read", True)


def check_run_model(run_dir: RunDir, config: RunFile | SftFile) -> str:
    check_model_unchanged(run_dir, Path(config.model.path))
    return f"the model in {config.model.path}"


def check_checkpoints(
    run_dir: RunDir, status: RunStatus, checkpoints: ResumePoint
) -> Iterator[Finding]:
    step = checkpoints.step
    if checkpoints.path is not None:
        yield Finding(f"the checkpoint of step {step}")
    lost = find_lost_batches(run_dir, checkpoints) if status.command == "rl" else []
    fix = f"a resume continues from step {step}"
    if lost:
        fix = (
            f"{RESTORE}: a resume from step {step} needs the batch of step {lost[0]}, which was "
            "deleted when a later checkpoint covered it"
        )
    for problem in checkpoints.refused:
        yield Finding(problem, fix, blocks=bool(lost))


def find_lost_batches(run_dir: RunDir, checkpoints: ResumePoint) -> list[int]:
    """Return the steps with missing batches that a resume from an older checkpoint needs."""
    with suppress(SightlineError):  # `check_batches` reports damaged progress
        if checkpoints.refused:
            steps = range(checkpoints.step + 1, read_progress(run_dir).step + 1)
            return [step for step in steps if not run_dir.batch(step).is_file()]
    return []


def read_waiting_batches(run_dir: RunDir, checkpoints: ResumePoint) -> list[Batch]:
    """Return the batches after the newest checkpoint."""
    if find_lost_batches(run_dir, checkpoints):
        return []
    waiting = RunState(run_dir, read_progress(run_dir)).announcements_after(checkpoints.step)
    return [Batch.from_bytes(ready.data) for ready in waiting]


def check_batches(batches: list[Batch], store: MediaStore) -> str:
    items = (item for batch in batches for sample in batch.samples for item in sample.items)
    refs = {ref for item in items for ref in item.refs}
    for ref in refs:
        store.get(ref)
    return f"{len(batches)} waiting batches, with their {len(refs)} images"


def check_best(run_dir: RunDir) -> Iterator[Finding]:
    run_state = RunState(run_dir, read_progress(run_dir))
    best = BestCheckpoint(Path(), run_dir.checkpoints / "best", run_state)
    if problem := best.find_problem():
        yield Finding(problem, "a resume writes a new one at the next evaluation")
    elif run_state.progress.best_step:
        yield Finding(f"the best checkpoint, of step {run_state.progress.best_step}")


def check_traces(run_dir: RunDir) -> Iterator[Finding]:
    """Report trace files that are missing, or differ from the digests in `verdicts.jsonl`."""
    fix = f"{RESTORE}. A resume does not read it"
    digests: dict[Path, str] = {}
    progress = read_progress(run_dir)
    for number, line in enumerate(read_lines(run_dir.verdicts), 1):
        try:
            values = json.loads(line)
            step, digest = int(values["step"]), values.get("traces", "")
        except (ValueError, TypeError, KeyError, OverflowError):
            yield Finding(f"{run_dir.verdicts}, line {number}, is damaged", fix)
            continue
        # An interrupted step may have verdicts but no traces. It is repeated.
        if step <= progress.step:
            digests[run_dir.traces_of(step)] = digest
    digests |= {run_dir.eval_traces(name): "" for name in progress.evals}
    pruned = {run_dir.inside(line.decode(errors="replace")) for line in read_lines(run_dir.pruned)}
    if missing := [file for file in digests if not file.is_file() and file not in pruned]:
        problem = f"{len(missing)} of {len(digests)} trace files are missing, the first is "
        yield Finding(f"{problem}{missing[0]}", fix)
    for file in filter(Path.is_file, digests):
        if digests[file] and digest_batch(read_bytes(file)) != digests[file]:
            yield Finding(f"{file} is damaged", fix)


def check_trace_images(run_dir: RunDir, store: MediaStore) -> Iterator[Finding]:
    """Report images in traces that are missing from the store."""
    digests: set[str] = set()
    for file in run_dir.traces.glob("*.msgpack"):
        with suppress(SightlineError):  # `check_traces` reports damaged files
            slots = (slot for trace in read_traces(file) for n in trace.nodes for slot in n.slots)
            digests |= {ref.digest for slot in slots for ref in slot.item.refs}
    # Not by a list, which an object store may answer from the past.
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        num_missing = list(pool.map(store.has, digests)).count(False)
    if num_missing:
        problem = f"{num_missing} of {len(digests)} images of traces are missing in {store.root}"
        yield Finding(problem, f"{RESTORE}; a resume does not need them")


def check_identity(run_dir: RunDir) -> Iterator[Finding]:
    """Report a run id or a secret that is missing, damaged or readable by others."""
    patterns = {run_dir.id_file: "[0-9a-f]{16}", run_dir.secret: rf"\S{{{MIN_SECRET_CHARS},}}"}
    for path, pattern in patterns.items():
        if not path.is_file():
            yield Finding(f"{path} is missing", "a resume writes a new one")
        elif not re.fullmatch(pattern, read_text(path, errors="replace").strip()):
            yield Finding(f"{path} is damaged", f"{RESTORE}, or delete it", blocks=True)
    if run_dir.secret.is_file() and run_dir.secret.stat().st_mode & 0o077:
        yield Finding(f"other users can read {run_dir.secret}", f"chmod 600 {run_dir.secret}")


def check_metrics(run_dir: RunDir, status: RunStatus) -> Iterator[Finding]:
    fix = f"{RESTORE}. A resume works without it"
    tail = EventTail(run_dir.metrics)
    events = tail.read()
    if status.step and not run_dir.metrics.exists() and str(run_dir.metrics) not in status.cause:
        yield Finding(f"{run_dir.metrics} is missing, and with it the curves", fix)
    if tail.num_invalid_lines:
        yield Finding(f"{run_dir.metrics} has {tail.num_invalid_lines} damaged lines", fix)
    has_ended = status.state != RUNNING and bool(events) and events[-1].kind == "end"
    if has_ended and not run_dir.summary.is_file():
        yield Finding(f"{run_dir.summary} is missing", fix)


def check_export(status: RunStatus, checkpoints: ResumePoint) -> Iterator[Finding]:
    """Compare the trained model with its recorded digests."""
    folder, problems = status.export_dir, list[str]()
    if status.state == RUNNING:
        return
    if folder.is_dir():
        try:
            problems = find_changed_files(folder)
        except OSError:
            problems = [f"{folder / SUMS} is missing"]
        if not problems:
            yield Finding(f"the trained model in {folder}")
    elif status.state == FINISHED and status.command != PREVIEW:
        problems = [f"the trained model in {folder} is missing"]
    fix = RESTORE
    if step := checkpoints.step:
        command = format_command("sightline", "export", status.run_dir.path, folder, "--force")
        fix += f", or write the model of step {step}: `{command}`"
    for problem in problems:
        yield Finding(problem, fix)


def check_run_disk(run_dir: RunDir) -> Iterator[Finding]:
    free = measure_free_space(run_dir.path)
    if free.num_bytes < SPARE_BYTES:
        fix = "free some space: `sightline prune` deletes the records of old runs"
        yield Finding(f"the disk of {run_dir.path} has {free}", fix, blocks=True)


def check_orphans(run_dir: RunDir, status: RunStatus) -> Iterator[Finding]:
    """Report processes that outlived their launcher."""
    if status.launcher is not None:
        return
    orphans: dict[str, list[int]] = defaultdict(list)
    for pid, name in sorted(find_marked(run_dir.path).items()):
        orphans[name].append(pid)
    for name, pids in orphans.items():
        problem = f"{len(pids)} processes of {name} run without their launcher"
        yield Finding(problem, f"kill -9 {' '.join(map(str, pids))}    # a resume also kills them")
