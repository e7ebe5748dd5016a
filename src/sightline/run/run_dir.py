"""Where the files of a run are. All of them can be read while the run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    def make(self) -> None:
        for folder in (
            self.traces, self.scores, self.batches, self.weights, self.checkpoints,
            self.logs, self.report,
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def media(self) -> Path:
        return self.path / "media"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def scores(self) -> Path:
        return self.path / "scores"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """Step and batch digest of every step in the history of the surviving weights."""
        return self.path / "ledger.jsonl"

    @property
    def verdicts(self) -> Path:
        """What became of each rollout, a line a step; the last line of a step holds."""
        return self.path / "verdicts.jsonl"

    @property
    def view(self) -> Path:
        """What the dashboard has indexed. It can be removed at any time, and is made again."""
        return self.path / "view"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def sinks(self) -> Path:
        return self.path / "sinks"

    @property
    def spans(self) -> Path:
        """Of OpenTelemetry, where a run keeps them itself."""
        return self.path / "spans.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def progress(self) -> Path:
        """The orchestrator's own state."""
        return self.checkpoints / "orchestrator.json"

    def beat(self, name: str) -> Path:
        """Touched by a process for as long as it can run."""
        return self.logs / f"{name}.beat"

    def batch(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}.msgpack"

    def traces_of(self, step: int) -> Path:
        return self.traces / f"step_{step:06d}.msgpack"

    def eval_traces(self, name: str) -> Path:
        return self.traces / f"eval_{name}.msgpack"

    def scores_of(self, step: int) -> Path:
        return self.scores / f"step_{step:06d}.msgpack"
