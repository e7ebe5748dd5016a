"""Where the files of a run are. All of them can be read while the run goes on."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import ResumeRefused
from sightline.wire.file import write_atomic


class _Inside:
    """A path inside the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: RunDir, owner: type[RunDir]) -> Path:
        return run_dir.inside(self._name)


def show_path(path: Path) -> str:
    """A path as people read it: from the current folder, where it lies below that."""
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
    """Step and batch digest of every step in the history of the surviving weights."""
    verdicts = _Inside("verdicts.jsonl")
    """What became of each rollout, a line a step; the last line of a step holds."""
    view = _Inside("view")
    """What the dashboard has indexed. It can be removed at any time, and is made again."""
    pruned = _Inside("pruned.txt")
    """The files that `sightline prune` has removed, a line each: nobody misses them."""
    notes = _Inside("notes.md")
    """What a person writes about the run, by hand; `#word` in it is a tag."""
    spans = _Inside("spans.jsonl")
    """The OpenTelemetry spans of a run that keeps them itself."""
    secret = _Inside("secret")
    """What the processes of the run know one another by; nobody but its owner may read it."""
    id_file = _Inside("run_id")
    """The run's id: every version that it publishes carries it, before and after a resume."""
    lock = _Inside(".lock")
    """Held by the launcher for as long as the run goes on."""
    servers = _Inside("servers.json")
    """Servers that a person has added to the run, or taken from it."""
    server_report = _Inside("logs/servers.json")
    """How the servers of the run stand, while it goes on."""
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
            return self.id_file.read_text(errors="replace").strip()
        except OSError as error:
            raise ResumeRefused(
                f"{self.id_file} cannot be read: {error.strerror}",
                "restore it from a copy; a resume of the run says what it was",
            ) from error

    def heartbeat(self, name: str) -> Path:
        """The file that a process touches for as long as it can run."""
        return self.logs / f"{name}.beat"

    def server_address(self, name: str) -> Path:
        """Where a server of the run that is on another machine says that it is."""
        return self.logs / f"{name}.url"

    def error_file(self, name: str) -> Path:
        """The problem and the fix of a process that failed, which the launcher quotes."""
        return self.logs / f"{name}.error.json"

    def batch(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}.msgpack"

    def list_batches(self) -> list[tuple[int, Path]]:
        """The steps whose batches are on disk, each with its file."""
        return [(int(file.stem[5:]), file) for file in self.batches.glob("step_*.msgpack")]

    def traces_of(self, step: int) -> Path:
        return self.traces / f"step_{step:06d}.msgpack"

    def eval_traces(self, name: str) -> Path:
        return self.traces / f"eval_{name}.msgpack"

    def scores_of(self, step: int) -> Path:
        return self.inside(f"scores/step_{step:06d}.msgpack")
