"""What is particular to one command that trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

from sightline.config import AnyRun, LoggingConfig
from sightline.launch.processes import Processes, ProcessSpec
from sightline.run import EventLog, RunDir
from sightline.view.console import LiveView
from sightline.view.sft_progress import SftProgress


class TrainingJob(ABC, Generic[AnyRun]):
    file_kind: type[AnyRun]
    command: str
    leader: str
    """The process whose end is the run's end."""
    trainer: str
    """The name of the trainer's rank 0."""

    def resolve(self, file: AnyRun) -> AnyRun:
        """The run file with what this machine decides."""
        return file

    @abstractmethod
    def check(self, file: AnyRun, run_dir: RunDir) -> None:
        """Refuses what cannot work, and prints what follows from the model."""

    @abstractmethod
    def count_trainer_threads(self, file: AnyRun) -> int:
        """Compute threads of all ranks on this machine."""

    @abstractmethod
    def build_specs(self, file: AnyRun, run_dir: RunDir) -> list[ProcessSpec]:
        """The processes of the run, in the order of their start; one trainer for all its ranks."""

    def build_supervisor(
        self, file: AnyRun, processes: Processes, specs: list[ProcessSpec], events: EventLog
    ) -> Callable[[], None]:
        """What replaces processes that may be replaced; called again and again."""
        return lambda: None

    def get_logging(self, file: AnyRun) -> LoggingConfig:
        return LoggingConfig()

    @abstractmethod
    def open_view(self, file: AnyRun, run_dir: RunDir) -> LiveView | SftProgress:
        """What a person sees while the run goes on."""

    @abstractmethod
    def print_outcome(self, file: AnyRun, run_dir: RunDir, stopped_by: str) -> None:
        """Says where the results are; `stopped_by` is empty for a run that reached its end."""
