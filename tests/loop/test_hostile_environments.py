"""Environments that change the folder, raise text that is not Unicode, and leave processes.

The run ends cleanly and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from loop.jobs import Job, sightline
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

HOSTILE = """
import os, subprocess, time
from pathlib import Path
from sightline.envs.color_codeword import ColorCodeword

HOME = Path(__file__).parent


class Hostile(ColorCodeword):
    def __init__(self):
        super().__init__()
        os.chdir("/")

    def note(self, pid):
        with open(HOME / "pids", "a") as file:
            file.write(f"{pid}\\n")

    async def rollout(self, task, chat):
        os.chdir("/")
        await chat.send([self._show(task, 0, chat.put)])
        if task.index == 0:
            raise ValueError("a half of a pair: \\ud800")
        if task.index == 1:
            self.note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            if (child := os.fork()) == 0:
                os.setsid()
                if os.fork() == 0:
                    self.note(os.getpid())
                    while True:
                        time.sleep(1)
                os._exit(0)
            os.waitpid(child, 0)
        if task.index == 2:
            return {"part \\ud800": chat.rng.random()}
        return chat.rng.random()
"""
RUN = """
[run]
name = "job"
steps = 12
[model]
path = "models/tiny"
[media]
root = "images"
[env]
name = "hostile:Hostile"
[rollout]
workers = 1
max_tokens = 4
[orchestrator]
groups_per_step = 2
group_size = 4
[eval]
tasks = 0
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_hostile_environment_affects_only_its_own_process(tmp_path: Path) -> None:
    sightline("model", "tiny", "models/tiny", cwd=tmp_path)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    (tmp_path / "run.toml").write_text(RUN)
    job = Job(tmp_path, "run.toml")
    pids = tmp_path / "pids"

    def is_noted() -> bool:
        return pids.is_file() and len(pids.read_text().split()) >= 8

    # The server stays stopped until the launcher reports it.
    job.wait_until(is_noted, 240)
    stopped = job.pid_of("server")
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()

    def is_named(words: str) -> bool:
        events = read_events(job.run_dir.metrics)
        return any(words in e.values["words"] for e in events if e.kind == "process")

    job.wait_until(lambda: is_named(f"a signal stopped server (process {stopped})"), 60)
    job.wait_until(lambda: is_named("has not answered for"), 60)
    print(f"named after {time.monotonic() - began:.1f} s")
    os.kill(stopped, signal.SIGCONT)
    job.wait_until(lambda: is_named("answers again, after"), 60)
    output = job.output()
    assert job.process.returncode == 0, output
    assert f"a signal stopped server (process {stopped})" in output, "on the console too"
    run_dir: RunDir = job.run_dir
    assert is_named("continues after") and is_named("answers again, after")
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())
    events = list(read_events(run_dir.metrics))
    assert not [event for event in events if event.kind == "lost"], "no worker was lost"
    traces = [t for file in run_dir.traces.glob("step_*") for t in read_traces(file)]
    errors = {trace.task: trace.error for trace in traces if trace.error}
    assert errors.keys() == {0, 2}
    assert "a half of a pair: \\ud800" in errors[0] and "cannot be written" in errors[2]
    assert list((tmp_path / "images").glob("??/??/*")) and not Path("/images").exists()
