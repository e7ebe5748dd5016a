"""What is wrong with a run that broke, what of it is safe, and what to type. Changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sightline.config import RunFile, SftFile, load_config
from sightline.errors import SightlineError
from sightline.launch.claim import check_model_unchanged
from sightline.launch.preflight import SPARE_BYTES
from sightline.media import MediaStore
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.run_state import RunState, read_progress
from sightline.run import RunDir
from sightline.trainer.checkpoint import CheckpointStore
from sightline.trainer.ledger import read_ledger
from sightline.view.run_status import FAILED, FINISHED, RUNNING, get_status
from sightline.wire.file import read_lines
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
    """Looks at every file that a resume would read, and at what still runs."""
    status = get_status(run_dir)
    found = Diagnosis(f"{status.state} at step {status.step} of {status.steps_total or '?'}")
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
    for problem in checkpoints.refused:
        fix = "a resume goes on from the checkpoint before it"
        found.problems.append(Problem(problem, fix, blocks=False))
    if checkpoints.path is not None:
        found.safe.append(f"the checkpoint of step {checkpoints.step}")
    if status.command == "rl":
        _examine_steps(run_dir, found, checkpoints.step, config)
    found.problems += _find_surroundings(run_dir, status.launcher is not None)
    if status.state == RUNNING:
        found.commands.append(f"sightline status {run_dir.path}    # it goes on")
    elif status.state != FINISHED and not any(problem.blocks for problem in found.problems):
        found.commands.append(f"{status.resume_command}    # goes on after step {checkpoints.step}")
    if checkpoints.path is not None:
        found.commands.append(f"sightline export {run_dir.path} DIR    # the model as it is now")
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
    run_dir: RunDir, found: Diagnosis, step: int, config: list[RunFile | SftFile]
) -> None:
    """What the orchestrator reads, beyond the trainer's checkpoint of `step`."""
    root = Path(config[0].media.root if config and config[0].media.root else run_dir.media)
    store, before = MediaStore(root), len(found.problems)

    def check_batches() -> str:
        run_state = RunState(run_dir, read_progress(run_dir))
        waiting = run_state.announcements_after(step)
        batches = [Batch.from_bytes(Path(ready.path).read_bytes()) for ready in waiting]
        refs = {i.ref for batch in batches for sample in batch.samples for i in sample.items}
        for ref in refs:
            store.get(ref)
        return f"{len(batches)} batches that wait, with their {len(refs)} images"

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
    found.run(lambda: f"the ledger of {len(read_ledger(run_dir.ledger, step))} steps")
    found.run(lambda: f"the history of {len(read_history(run_dir.weights))} versions")
    fix = "put it back from a copy; no resume reads it"
    found.problems += [Problem(one, fix, blocks=False) for one in _find_damaged_traces(run_dir)]


def _find_damaged_traces(run_dir: RunDir) -> Iterator[str]:
    """Traces that are not what `verdicts.jsonl` says; those that were pruned are not missed."""
    digests: dict[int, str] = {}
    for number, line in enumerate(read_lines(run_dir.verdicts), 1):
        try:
            values = json.loads(line)
            digests[values["step"]] = values.get("traces", "")
        except (ValueError, TypeError, KeyError):
            yield f"{run_dir.verdicts}, line {number}, is damaged"
    for step, digest in digests.items():
        path = run_dir.traces_of(step)
        if digest and path.is_file() and digest_batch(path.read_bytes()) != digest:
            yield f"{path} is damaged: it is not what was written"


def _find_surroundings(run_dir: RunDir, is_running: bool) -> Iterator[Problem]:
    """A full disk, and processes that outlived their launcher."""
    free = shutil.disk_usage(run_dir.path).free
    if free < SPARE_BYTES:
        fix = "free some space: `sightline prune` removes the records of old runs"
        yield Problem(f"the disk of {run_dir.path} has {free / 1e9:.2f} GB free", fix)
    for pid, name in [] if is_running else find_orphans(run_dir):
        problem = f"process {pid} ({name}) of the run still runs, without its launcher"
        yield Problem(problem, f"kill {pid}")


def find_orphans(run_dir: RunDir) -> list[tuple[int, str]]:
    """The processes of a run on this machine, by their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            here = Path(os.readlink(folder / "cwd"))
        except OSError:  # it has ended, or is somebody else's
            continue
        at = words.index("process") if "process" in words else -1
        if at < 1 or "sightline" not in words[at - 1] or len(words) < at + 3:
            continue
        if (here / words[at + 2]).resolve() == run_dir.path.resolve():
            found.append((int(folder.name), words[at + 1]))
    return sorted(found)
