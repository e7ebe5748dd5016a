"""Paths of a run's files. All files can be read while the run is active."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import ResumeRefused
from sightline.regular_file import read_text
from sightline.wire.file import write_atomic


class _Inside:
    """A path inside the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: RunDir, owner: type[RunDir]) -> Path:
        return run_dir.inside(self._name)


def show_path(path: Path) -> str:
    """Return the path relative to the current folder, if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    config = _Inside("config.toml")
    media = _Inside("media")
    traces = _Inside("traces")
    scores = _Inside("scores")
    batches = _Inside("batches")
    weights = _Inside("weights")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")
    report = _Inside("report")
    samples = _Inside("samples")
    sinks = _Inside("sinks")
    metrics = _Inside("metrics.jsonl")
    summary = _Inside("summary.json")
    ledger = _Inside("ledger.jsonl")
    """Step and batch digest of every step that led to the current weights."""
    verdicts = _Inside("verdicts.jsonl")
    """Rollout verdicts, one line per step. The last line of a step counts."""
    view = _Inside("view")
    """The dashboard's index. It may be removed at any time and is rebuilt on demand."""
    pruned = _Inside("pruned.txt")
    """Files that `sightline prune` has removed, one per line."""
    notes = _Inside("notes.md")
    """The user's notes. `#word` is a tag."""
    secret = _Inside("secret")
    """Shared secret of the run's processes, readable only by its owner."""
    model_digests = _Inside("model.json")
    """Digests of the files of the checkpoint that the run began with."""
    id_file = _Inside("run_id")
    """The run's id, which is part of every published version. A resumed run keeps it."""
    lock = _Inside(".lock")
    """Lock file that the launcher holds while the run is active."""
    servers = _Inside("servers.json")
    """Servers that the user has added to or removed from the run."""
    server_report = _Inside("logs/servers.json")
    """State of the run's servers while it is active."""
    progress = _Inside("checkpoints/orchestrator.json")
    """The orchestrator's own state."""

    def inside(self, name: str) -> Path:
        return self.path / name

    def make(self) -> None:
        for folder in (
            self.traces, self.scores, self.batches, self.weights, self.checkpoints,
            self.logs, self.report,
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)
        if not self.id_file.exists():
            write_atomic(self.id_file, secrets.token_hex(8).encode())

    def read_id(self) -> str:
        try:
            return read_text(self.id_file, errors="replace").strip()
        except OSError as error:
            raise ResumeRefused(
                f"{self.id_file} cannot be read: {error.strerror}",
                "restore it from a copy. Resuming the run prints the id that it expects",
            ) from error

    def heartbeat(self, name: str) -> Path:
        """Return the heartbeat file of a process."""
        return self.logs / f"{name}.beat"

    def server_address(self, name: str) -> Path:
        """Return the file to which a server on another machine writes its address."""
        return self.logs / f"{name}.url"

    def error_file(self, name: str) -> Path:
        """Return the file with a failed process's problem and fix."""
        return self.logs / f"{name}.error.json"

    def batch(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}.msgpack"

    def list_batches(self) -> list[tuple[int, Path]]:
        """Return the steps whose batches are on disk, with their files."""
        return [(int(file.stem[5:]), file) for file in self.batches.glob("step_*.msgpack")]

    def traces_of(self, step: int) -> Path:
        return self.traces / f"step_{step:06d}.msgpack"

    def eval_traces(self, name: str) -> Path:
        return self.traces / f"eval_{name}.msgpack"

    def scores_of(self, step: int) -> Path:
        return self.inside(f"scores/step_{step:06d}.msgpack")
