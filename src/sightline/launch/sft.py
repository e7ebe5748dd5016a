"""Supervised training, in one process with all cores, or in several ranks that share them."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from sightline import config as config_module
from sightline.config import SftFile, check_resume, dump_toml
from sightline.errors import ResumeRefused
from sightline.families import Family
from sightline.launch.claim import (
    check_model_unchanged,
    claim_run_dir,
    lock_run_dir,
    record_model_digests,
)
from sightline.launch.preflight import (
    check_conversations,
    check_model,
    check_store,
    describe_packing,
    resolve_model,
)
from sightline.launch.processes import (
    Processes,
    ProcessSpec,
    SignalCounter,
    num_cores,
    watch_processes,
)
from sightline.launch.rl import build_trainer_specs
from sightline.run import RunDir
from sightline.run.events import EventTail
from sightline.wire.event import Event
from sightline.wire.file import write_atomic

PROCESS_NAME = "sft"
PRINT_EVERY_STEPS = 20


def start_sft(config: SftFile) -> RunDir:
    config = resolve_model(config)
    family = _check(config)
    run_dir = claim_run_dir(config.run.dir, config.run.name)
    with lock_run_dir(run_dir):
        record_model_digests(run_dir, Path(config.model.path))
        return _run(config, run_dir, family)


def resume_sft(path: Path, overrides: list[str]) -> RunDir:
    """Goes on with a run that was stopped or killed, from its last checkpoint."""
    run_dir = RunDir(path)
    if not run_dir.config.is_file():
        raise ResumeRefused(f"{path} is no run directory", "name the folder that holds config.toml")
    old = config_module.load_config(SftFile, run_dir.config)
    new = config_module.load_config(SftFile, run_dir.config, overrides)
    check_resume(old, new)
    family = _check(new)
    with lock_run_dir(run_dir):
        check_model_unchanged(run_dir, Path(new.model.path))
        return _run(new, run_dir, family)


def _check(config: SftFile) -> Family:
    if config.env is not None:
        return check_model(config.model, config.env)
    return check_conversations(config)


def _run(config: SftFile, run_dir: RunDir, family: Family) -> RunDir:
    check_store(Path(config.media.root or run_dir.media), config.media.max_gb)
    for folder in (run_dir.logs, run_dir.checkpoints, Path(config.sft.output_dir).parent):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir.config, dump_toml(config).encode())
    processes = Processes(run_dir, command="sft")
    console = Console()
    console.print(describe_packing(family), highlight=False, soft_wrap=True)
    view = _ProgressPrinter(run_dir, config.run.steps, console)
    try:
        with SignalCounter() as signals:
            for spec in _build_specs(config, run_dir):
                processes.start(spec)
            stopped = watch_processes(processes, PROCESS_NAME, view.update, signals)
        view.update()
    finally:
        processes.kill()
    print(f"run: {run_dir.path}")
    if stopped:
        print(f"stopped; go on with `{processes.resume}`")
    else:
        print(f"checkpoint: {config.sft.output_dir}")
    return run_dir


def _build_specs(config: SftFile, run_dir: RunDir) -> list[ProcessSpec]:
    threads = max(1, (config.trainer.threads or num_cores()) // config.trainer.ranks)
    words = ["process", PROCESS_NAME, str(run_dir.path), "--parent", str(os.getpid())]
    return build_trainer_specs(ProcessSpec(PROCESS_NAME, words, threads), config.trainer)


class _ProgressPrinter:
    """A line every so many steps, and one for each evaluation."""

    def __init__(self, run_dir: RunDir, steps: int, console: Console) -> None:
        self._tail = EventTail(run_dir.metrics)
        self._steps, self._console = steps, console

    def update(self) -> None:
        for event in self._tail.read():
            if words := self._words(event):
                self._console.print(words, highlight=False)

    def _words(self, event: Event) -> str:
        step, loss = event.step, event.values.get("loss")
        if loss is None:
            return ""
        if event.kind == "sft_eval":
            return f"held out, after step {step:4d}  loss {loss:.4f}"
        if event.kind == "sft" and (step % PRINT_EVERY_STEPS == 0 or step == self._steps):
            return f"sft step {step:4d}/{self._steps}  loss {loss:.4f}"
        return ""
