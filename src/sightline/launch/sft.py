"""Supervised fine-tuning, in one process or in several ranks that share the cores."""

from __future__ import annotations

import os
from pathlib import Path

from sightline.config import SftFile
from sightline.launch.processes import ProcessSpec, num_cores
from sightline.launch.training_run import TrainingJob
from sightline.run import RunDir
from sightline.run.run_dir import show_path
from sightline.view.sft_progress import SftProgress
from sightline.view.summary import summarize


class SftJob(TrainingJob[SftFile]):
    """The job of `sightline sft`."""

    file_kind = SftFile
    command = leader = trainer = "sft"

    def count_trainer_threads(self, file: SftFile) -> int:
        return file.trainer.threads or num_cores()

    def build_specs(self, file: SftFile, run_dir: RunDir) -> list[ProcessSpec]:
        Path(file.sft.output_dir).parent.mkdir(parents=True, exist_ok=True)
        threads = max(1, self.count_trainer_threads(file) // file.trainer.ranks)
        words = ["process", self.trainer, str(run_dir.path), "--parent", str(os.getpid())]
        return [ProcessSpec(self.trainer, words, threads)]

    def open_view(self, file: SftFile, run_dir: RunDir) -> SftProgress:
        return SftProgress(run_dir, file.run.steps)

    def print_outcome(self, file: SftFile, run_dir: RunDir, stopped_by: str) -> None:
        summarize(run_dir, **({"stopped_by": stopped_by} if stopped_by else {}))
        print(f"run: {show_path(run_dir.path)}")
        if not stopped_by:
            print(f"checkpoint: {file.sft.output_dir}")
