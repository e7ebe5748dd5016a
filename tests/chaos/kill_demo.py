"""Kills one process of the demo in the middle, resumes, and prints what came of it.

    .venv/bin/python tests/chaos/kill_demo.py [trainer server orchestrator ...] [--at 60]

Needs `models/warm`, which `make demo` leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from watching import find_child

from sightline.run import RunDir
from sightline.view.events import by_step, read_events

RUN_FILE = "examples/color_codeword/cpu.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("victims", nargs="*", default=["trainer", "server", "orchestrator"])
    parser.add_argument("--at", type=int, default=60, help="kill after this step")
    args = parser.parse_args()
    print("| killed | after step | replayed | steps in the ledger | reward | resumed reward |")
    print("|---|---|---|---|---|---|")
    for victim in args.victims:
        print(kill_once(victim, args.at), flush=True)


def kill_once(victim: str, at: int) -> str:
    name = f"killed-{victim}"
    before = set(Path("runs").glob(f"{name}-*"))
    words = [sys.executable, "-m", "sightline", "rl", "--plain", RUN_FILE, f"run.name={name}"]
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (found := set(Path("runs").glob(f"{name}-*")) - before):
        time.sleep(0.2)
    run_dir = RunDir(found.pop())
    while max(trained(run_dir), default=0) < at:
        time.sleep(0.1)
    pid = find_child(job.pid, victim)
    assert pid is not None, f"no process {victim}"
    os.kill(pid, signal.SIGKILL)
    code = job.wait()
    assert code == 2, f"the launcher ended with {code}"
    died_at, covered = max(trained(run_dir)), newest_checkpoint(run_dir)
    resume = [sys.executable, "-m", "sightline", "rl", "--plain", "--resume", str(run_dir.path)]
    subprocess.run(resume, check=True, stdout=subprocess.DEVNULL)
    steps = [json.loads(line)["step"] for line in run_dir.ledger.read_bytes().splitlines()]
    once = "every one once" if steps == list(range(1, len(steps) + 1)) else "BROKEN"
    summary = json.loads(run_dir.summary.read_text())
    return (
        f"| {victim} | {died_at} | {died_at - covered} | {len(steps)}, {once} "
        f"| {summary['reward_start']:.3f} | {summary['reward_final']:.3f} |"
    )


def trained(run_dir: RunDir) -> list[int]:
    return list(by_step(read_events(run_dir.metrics), "train"))


def newest_checkpoint(run_dir: RunDir) -> int:
    found = sorted(run_dir.checkpoints.glob("step_*"))
    return int(found[-1].name.removeprefix("step_")) if found else 0


if __name__ == "__main__":
    main()
