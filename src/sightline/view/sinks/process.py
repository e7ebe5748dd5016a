"""The process that feeds a run's sinks. The run does not depend on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from sightline.config import LoggingConfig
from sightline.run import RunDir
from sightline.view.sinks.protocol import CLOSE_TIMEOUT_S, STATUS_OK, STATUS_PREFIX

GRACE_S = 5.0


class SinkProcess:
    """A context in which the process runs. The launcher does not watch it."""

    def __init__(
        self,
        config: LoggingConfig,
        run_dir: RunDir,
        on_problem: Callable[[str], object] = lambda words: None,
    ) -> None:
        """`on_problem` is called with a text for each sink that failed."""
        self._process: subprocess.Popen[bytes] | None = None
        self._words = [sys.executable, "-m", "sightline", "sinks", str(run_dir.path)]
        self._words += [word for name in config.sinks for word in ("--to", name)]
        self._words += ["--samples-every", str(config.samples_every)]
        self._words += ["--parent", str(os.getpid()), "--follow"]
        self._words += ["--offline"] if config.wandb_offline else []
        self._log = run_dir.logs / "sinks.log"
        self._has_sinks = bool(config.sinks)
        self._on_problem = on_problem
        self._log_start = 0

    def __enter__(self) -> SinkProcess:
        if not self._has_sinks:
            return self
        try:
            with open(self._log, "ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    self._words, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._on_problem(f"sinks: the process that feeds them did not start: {error}")
        return self

    def __exit__(self, *error: object) -> None:
        """Let it read to the end, and kill it if it does not finish in time."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(CLOSE_TIMEOUT_S + GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for words in self._list_problems(self._process.returncode):
            self._on_problem(words)

    def _list_problems(self, exit_code: int) -> list[str]:
        try:
            lines = self._log.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        except OSError:
            lines = []
        statuses = [line for line in lines if line.startswith(STATUS_PREFIX)]
        if not statuses:
            return [f"sinks: the process that feeds them ended with {exit_code}; see {self._log}"]
        return [line for line in statuses if not line.endswith(f": {STATUS_OK}")]
