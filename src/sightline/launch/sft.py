"""A supervised warm-up, in one process with all cores."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from sightline.config import SftFile, dump
from sightline.launch.claim import claim_run_dir
from sightline.launch.preflight import check_model, check_store, packing_line, resolve_model
from sightline.launch.processes import Processes, Signals, Spec, num_cores, watch
from sightline.monitor import RunDir
from sightline.monitor.events import by_step, read_events

NAME = "sft"
EVERY_STEPS = 20


def start_sft(config: SftFile) -> RunDir:
    config = resolve_model(config)
    family = check_model(config.model, config.env)
    run_dir = claim_run_dir(config.run.dir, config.run.name)
    check_store(Path(config.media.root or run_dir.media), config.media.max_gb)
    for folder in (run_dir.logs, Path(config.sft.output).parent):
        folder.mkdir(parents=True, exist_ok=True)
    run_dir.config.write_text(dump(config))
    threads = config.trainer.threads or num_cores()
    processes = Processes(run_dir)
    console = Console()
    console.print(packing_line(family), highlight=False, soft_wrap=True)
    printed = 0

    def show() -> None:
        nonlocal printed
        for step, event in by_step(read_events(run_dir.metrics), "sft").items():
            last = step == config.run.steps
            if step > printed and (step % EVERY_STEPS == 0 or last):
                loss = event.values["loss"]
                console.print(f"sft step {step:4d}/{config.run.steps}  loss {loss:.4f}")
                printed = step

    try:
        with Signals() as signals:
            words = ["process", NAME, str(run_dir.path), "--parent", str(os.getpid())]
            processes.start(Spec(NAME, words, threads))
            watch(processes, NAME, show, signals)
        show()
    finally:
        processes.kill()
    print(f"run: {run_dir.path}")
    print(f"checkpoint: {config.sft.output}")
    return run_dir
