"""Sinks: copies of a run's metrics in TensorBoard, W&B and trackio.

    metrics.jsonl, traces/ <--read-- `sightline sinks` (its own process) --> each sink in turn

The run itself only writes `metrics.jsonl`. A sink that fails or blocks never affects the run.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from PIL.Image import Image

from sightline.config import LoggingConfig
from sightline.errors import ConfigError
from sightline.regular_file import open_file, read_bytes
from sightline.run import RunDir

SINKS = {"tensorboard": "TensorBoard", "wandb": "Wandb", "trackio": "Trackio"}
"""Class of each sink, by the name of its module and package."""
CLOSE_TIMEOUT_S = 25.0
"""Time limit for the sinks to finish after the run has ended."""
PROBLEM_PREFIX = "sink "
"""Prefix of lines in `logs/sinks.log` that report a failed sink."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run's identity for sinks."""

    name: str
    """The name of its folder. Other runs may have the same name."""
    unique_name: str
    """The name with the run's id. It is the same each time the run is fed."""
    settings: dict[str, Any]
    """Sections of the run file."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout as a table row."""

    trace_id: str
    verdict: str
    reward: float | None
    text: str
    thumbs: tuple[Image, ...]
    """Reduced copies of its images."""


class Sink(Protocol):
    """A destination for metrics. Its methods may block."""

    def numbers(self, step: int, values: dict[str, float]) -> None: ...

    def samples(self, step: int, samples: list[RolloutRow]) -> None: ...

    def close(self) -> None: ...


def check_sinks(names: Sequence[str]) -> None:
    """Raise for unknown sinks and for sinks whose package is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"there is no sink {name!r}", f"choose from {', '.join(SINKS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"the package {name} is not installed", f"run `pip install 'sightline-rl[{name}]'`"
            )


@contextmanager
def feed_in_background(
    config: LoggingConfig, run_dir: RunDir, on_problem: Callable[[str], object]
) -> Iterator[None]:
    """Feed the run's sinks in another process. Call `on_problem` for each sink that failed."""
    if not config.sinks and not config.upload_samples_to:
        yield
        return
    command = [sys.executable, "-m", "sightline", "sinks", str(run_dir.path), "--follow"]
    command += [word for name in config.sinks for word in ("--to", name)]
    command += ["--samples-every", str(config.samples_every)]
    command += ["--offline"] if config.wandb_offline else []
    if config.upload_samples_to:
        command += ["--upload-samples-to", config.upload_samples_to]
    log_path = run_dir.logs / "sinks.log"
    with open_file(log_path, "ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()  # it still reads to the end
        try:
            process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            lines = read_bytes(log_path)[log_start:].decode(errors="replace").splitlines()
            problems = [line for line in lines if line.startswith(PROBLEM_PREFIX)]
            code = process.returncode
            for problem in problems or [f"the sinks' process ended with {code}. See {log_path}"]:
                on_problem(problem)
