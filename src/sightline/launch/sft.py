"""Supervised training, in one process with all cores, or in several ranks that share them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sightline.config import LoggingConfig, SftFile
from sightline.launch.preflight import (
    check_conversations,
    check_disk,
    check_model,
    describe_packing,
)
from sightline.launch.processes import Processes, ProcessSpec, num_cores
from sightline.launch.torchrun import TorchrunContext, build_local_specs
from sightline.run import EventLog, RunDir
from sightline.run.events import EventTail
from sightline.wire.event import Event

PRINT_EVERY_STEPS = 20


@dataclass(frozen=True)
class SftJob:
    """What `sightline sft` runs."""

    file_kind = SftFile
    command = leader = trainer = "sft"

    def resolve(self, file: SftFile) -> SftFile:
        return file

    def check(self, file: SftFile, run_dir: RunDir) -> None:
        if file.env is not None:
            family = check_model(file.model, file.env)
        else:
            family = check_conversations(file)
        check_disk(file, run_dir)
        print(describe_packing(family))

    def count_trainer_threads(self, file: SftFile) -> int:
        return file.trainer.threads or num_cores()

    def build_specs(
        self, file: SftFile, run_dir: RunDir, context: TorchrunContext | None
    ) -> list[ProcessSpec]:
        Path(file.sft.output_dir).parent.mkdir(parents=True, exist_ok=True)
        threads = max(1, self.count_trainer_threads(file) // file.trainer.ranks)
        words = ["process", self.trainer, str(run_dir.path), "--parent", str(os.getpid())]
        spec = ProcessSpec(self.trainer, words, threads)
        return build_local_specs(spec, file.trainer, run_dir, context)

    def build_supervisor(
        self, file: SftFile, processes: Processes, specs: list[ProcessSpec], events: EventLog
    ) -> Callable[[], None]:
        return lambda: None

    def get_logging(self, file: SftFile) -> LoggingConfig:
        return LoggingConfig()

    def open_view(self, file: SftFile, run_dir: RunDir) -> ProgressPrinter:
        return ProgressPrinter(run_dir, file.run.steps)

    def print_outcome(self, file: SftFile, run_dir: RunDir, stopped_by: str) -> None:
        print(f"run: {run_dir.path}")
        if stopped_by:
            print(f"stopped; go on with `sightline sft --resume {run_dir.path}`")
        else:
            print(f"checkpoint: {file.sft.output_dir}")


class ProgressPrinter:
    """Prints a line every so many steps, and one for each evaluation."""

    def __init__(self, run_dir: RunDir, steps: int) -> None:
        self._tail = EventTail(run_dir.metrics)
        self._steps = steps

    def update(self) -> None:
        for event in self._tail.read():
            if words := self._describe(event):
                print(words, flush=True)

    def close(self) -> None: ...

    def _describe(self, event: Event) -> str:
        step, loss = event.step, event.values.get("loss")
        if loss is None:
            return ""
        if event.kind == "sft_eval":
            return f"held out, after step {step:4d}  loss {loss:.4f}"
        if event.kind == "sft" and (step % PRINT_EVERY_STEPS == 0 or step == self._steps):
            return f"sft step {step:4d}/{self._steps}  loss {loss:.4f}"
        return ""
