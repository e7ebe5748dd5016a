"""A run of real processes with injected faults: started, watched, resumed and checked."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from watching import find_child, names_of

from sightline.run import RunDir
from sightline.view.events import by_step, read_events

ROOT = Path(__file__).resolve().parents[2]
MAX_S = 10.0 * float(os.environ.get("PATIENCE", "1"))
"""Maximum time in which a failure ends all processes or is reported."""
MANY_STEPS = 1_000_000
TRAIN_METRICS = (
    "loss", "clip_fraction", "entropy", "mismatch_kl", "lag_kl", "lr", "trained_tokens", "tokens",
    "micro_batches", "samples", "images", "distinct_images", "bad_media", "grad_norm",
)  # fmt: skip
STEP_METRICS = (
    "reward", "reward_std", "reward_group_std", "lag_mean", "groups", "no_signal_rate", "truncated",
    "broken", "samples", "answer_tokens_mean", "turns_mean", "tokens_sampled", "images_shown",
)  # fmt: skip
PATIENCE_S = 300.0 * float(os.environ.get("PATIENCE", "1"))
"""Longest wait for a step, or for the end of a run."""
RUN_FILE = """
[run]
name = "chaos"
steps = {steps}
[model]
path = "tiny"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 6
workers = 1
[orchestrator]
groups_per_step = 2
group_size = 2
[trainer]
ranks = {ranks}
checkpoint_every = 2
micro_batch_tokens = 64
[inference]
max_num_seqs = 16
max_model_len = 128
[media]
max_bad_fraction = 0.0
[eval]
tasks = 0
"""


class FaultNotSurvived(AssertionError):
    """The run broke a guarantee."""


@dataclass
class ChaosRun:
    home: Path
    rng: random.Random
    ranks: int = 2
    overrides: tuple[str, ...] = ()
    """Settings of every start."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process."""
    run: str = "runs/chaos-001"
    seen: dict[int, str] = field(default_factory=dict)
    """Every step and its batch, from the first progress file that names it."""
    process: subprocess.Popen[bytes] | None = None
    life_began: int = 0
    """The byte offset in the output at which this start begins."""

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.home / self.run)

    def prepare(self) -> None:
        for path in self.home.glob("*") if self.home.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.home.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / "loop" / "vowels.py", self.home)
        (self.home / "run.toml").write_text(RUN_FILE.format(steps=MANY_STEPS, ranks=self.ranks))
        self.sightline("model", "tiny", "tiny").wait()

    def sightline(self, *words: str) -> subprocess.Popen[bytes]:
        slow = str(Path(__file__).parent / "slow_disk")
        path = os.pathsep.join([slow, *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.output, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "sightline", *words],
                cwd=self.home, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, **self.variables},
            )  # fmt: skip

    @property
    def output(self) -> Path:
        return self.home.with_name(f"{self.home.name}.log")  # not on the disk that gets full

    # --- starts and ends

    def start(self, *overrides: str) -> None:
        self.life_began = self.output.stat().st_size if self.output.exists() else 0
        words = ["--resume", self.run] if self.run_dir.path.is_dir() else ["run.toml"]
        self.process = self.sightline("rl", "--plain", *words, *self.overrides, *overrides)

    def ensure_running(self) -> None:
        """Start the run unless it is running, and wait for a step."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        self.wait_for_step()

    def stop(self) -> None:
        """Stop the run cleanly."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.expect(self.process.wait(PATIENCE_S) == 0, "a run that is told to ends well")

    def kill_all(self) -> None:
        """Kill all processes at once, as a power cut does."""
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGSTOP)  # so that it replaces nobody
        for name in names_of(self.run_dir.path):
            if (pid := find_child(self.process.pid, name)) is not None:
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.wait_until_gone()

    def wait_until_gone(self) -> float:
        """Return the seconds until all processes of the run have ended."""
        began = time.monotonic()
        while names_of(self.run_dir.path):
            self.check_patience(began, "the end of all processes")
            time.sleep(0.02)
        return time.monotonic() - began

    def pid_of(self, name: str) -> int:
        assert self.process is not None
        if name == "launcher":
            return self.process.pid
        parent, pids = self.process.pid, list[int]()

        def is_there() -> bool:
            pid = find_child(parent, name)
            pids[:] = [] if pid is None else [pid]
            return bool(pids)

        self.wait(is_there, f"the process {name}")
        return pids[0]

    # --- observation

    def wait_for_step(self, more: int = 1) -> None:
        first = self.last_step()
        self.wait(lambda: self.last_step() >= first + more, "a step")

    def wait(self, there: Callable[[], bool], what: str, pause_s: float = 0.05) -> None:
        began = time.monotonic()
        while not there():
            self.remember_batches()
            is_alive = self.process is not None and self.process.poll() is None
            self.expect(is_alive, f"the run goes on until {what}")
            self.check_patience(began, what)
            time.sleep(pause_s)

    def check_patience(self, since: float, what: str) -> None:
        self.expect(time.monotonic() - since < PATIENCE_S, f"{what} within {PATIENCE_S:.0f} s")

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise FaultNotSurvived(f"not so: {what}\n{self.words()[-3000:]}")

    def last_step(self) -> int:
        return max(by_step(read_events(self.run_dir.metrics), "train"), default=0)

    def words(self) -> str:
        """Return the launcher's output since the last start."""
        with open(self.output, "rb") as file:
            file.seek(self.life_began)
            return file.read().decode(errors="replace")

    def find_cause(self) -> str:
        """Return why the run ended: one cause with its fix."""
        lines = self.words().splitlines()
        fixes = [i for i, line in enumerate(lines) if line.startswith("  fix: ")]
        self.expect(len(fixes) == 1, "one cause, and what to do")
        self.expect("Traceback" not in self.words(), "a cause in words")
        return lines[fixes[0] - 1]

    # --- the ledger

    def remember_batches(self) -> None:
        """Record every new batch. Its content must not change before it is trained."""
        try:
            batches = json.loads(self.run_dir.progress.read_bytes())["batches"]
        except (OSError, ValueError):  # none yet, or damaged on purpose
            return
        for step, digest in batches.items():
            self.seen.setdefault(int(step), digest)

    def ledger(self) -> dict[int, str]:
        """Return each step and its batch. Check that it equals the batch of every earlier start."""
        if not self.run_dir.ledger.is_file():
            return {}
        lines = [json.loads(line) for line in self.run_dir.ledger.read_bytes().splitlines()]
        steps = [line["step"] for line in lines]
        self.expect(steps == list(range(1, len(lines) + 1)), f"every step once: {steps}")
        for line in lines:
            known = self.seen.setdefault(line["step"], line["batch"])
            self.expect(known == line["batch"], f"step {line['step']} trains on its own batch")
        return {line["step"]: line["batch"] for line in lines}

    def count_uncovered(self) -> int:
        """Return the steps that the next start trains again."""
        paths = sorted(self.run_dir.checkpoints.glob("step_*"))
        covered = int(paths[-1].name.removeprefix("step_")) if paths else 0
        return max(0, max(self.ledger(), default=0) - covered)

    def finish(self) -> int:
        """Let the run finish, and return the number of its steps."""
        self.stop()
        last = max(self.seen | self.ledger(), default=0) + 2
        self.start(f"run.steps={last}")
        assert self.process is not None
        self.expect(self.process.wait(PATIENCE_S) == 0, "the run comes to its end")
        self.expect(list(self.ledger()) == list(range(1, last + 1)), "every step once")
        history = (self.run_dir.weights / "history.jsonl").read_bytes().splitlines()
        epochs = [json.loads(line)["epoch"] for line in history]
        self.expect(not any(epochs), "weights that are made again have the same bits")
        return last

    def compare_with_undisturbed(self) -> None:
        """Plays the same steps in a run that nothing happens to. It has the same weights, to the
        bit, and the same metrics in every step."""
        words = ["rl", "--plain", "run.toml", *self.overrides, "run.name=undisturbed"]
        process = self.sightline(*words, f"run.steps={max(self.ledger())}")
        self.expect(process.wait(PATIENCE_S) == 0, "an undisturbed run comes to its end")
        undisturbed = RunDir(self.home / "runs" / "undisturbed-001")
        for read in (read_weights, read_metrics):
            mine, other = read(self.run_dir), read(undisturbed)
            differing = [step for step in mine.keys() | other if mine.get(step) != other.get(step)]
            step = min(differing, default=0)
            what = f"{read.__name__}, step {step}: {mine.get(step)} != {other.get(step)}"
            self.expect(not differing, f"a run that was killed equals one that was not: {what}")


def read_weights(run_dir: RunDir) -> dict[int, str]:
    """Return the digest of each version's tensors."""
    lines = (run_dir.weights / "history.jsonl").read_bytes().splitlines()
    return {(line := json.loads(text))["version"]: line["sha256"] for text in lines}


def read_metrics(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step, without times and caches. Of a step that was trained again,
    the last ones count."""
    events, found = read_events(run_dir.metrics), dict[int, dict[str, Any]]()
    for kind, names in (("train", TRAIN_METRICS), ("step", STEP_METRICS)):
        for step, event in by_step(events, kind).items():
            found.setdefault(step, {}).update({name: event.values[name] for name in names})
    return found
