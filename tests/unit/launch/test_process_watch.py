"""Stopped processes are reported, logs are bounded, and orphans are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline.launch import process_watch
from sightline.launch.process_watch import (
    StoppedProcessWatch,
    bound_logs,
    kill_marked,
)
from sightline.launch.processes import Processes, ProcessSpec
from sightline.run import RunDir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def build_processes(folder: Path) -> Processes:
    run_dir = RunDir(folder / "run")
    run_dir.make()
    return Processes(run_dir)


def start_code(processes: Processes, name: str, code: str) -> None:
    """Starts `code` as a process of a run."""
    folder = processes.run_dir.path
    (folder / f"{name}.py").write_text(code)
    python = folder / f"{name}.sh"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder}/{name}.py\n")
    python.chmod(0o755)
    processes.start(ProcessSpec(name, [], threads=1, python=str(python)))


def wait_for(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_suspended_process_and_its_continuation_are_reported(tmp_path: Path) -> None:
    processes, reports = build_processes(tmp_path), list[str]()
    watch = StoppedProcessWatch(processes.list_pids, reports.append, after_s=0.2)

    def look() -> list[str]:
        watch.check()
        return reports

    try:
        for name in ("orchestrator", "worker-0"):
            start_code(processes, name, "import time\ntime.sleep(1000)\n")
        pid = processes.list_pids()["orchestrator"]
        assert not look()
        processes.signal("orchestrator", signal.SIGSTOP)
        wait_for(look)
        assert f"a signal stopped orchestrator (process {pid}) " in reports[0]
        assert f"`kill -CONT {pid}`" in reports[0]
        watch.check()
        assert len(reports) == 1, "said once"
        processes.signal("orchestrator", signal.SIGCONT)
        wait_for(lambda: len(look()) == 2)
        assert f"orchestrator (process {pid}) continues after " in reports[1]
        processes.signal("orchestrator", signal.SIGSTOP)
        wait_for(lambda: len(look()) == 3)
        processes.kill_process("orchestrator")
        watch.check()
        assert len(reports) == 3, "one that was killed does not go on"
    finally:
        processes.kill()


LEAVES = """
import os, subprocess, sys, time
from pathlib import Path

def note(pid):
    with open("pids", "a") as file:
        file.write(f"{pid}\\n")

os.chdir(os.path.dirname(__file__))
note(subprocess.Popen(["sleep", "1000"]).pid)
note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
cleared = "sleep 1000 & sleep 1000"
note(subprocess.Popen(["sh", "-c", cleared], env={}, process_group=0).pid)
if os.fork() == 0:  # a daemon: two forks and a session of its own
    os.setsid()
    if os.fork() == 0:
        note(os.getpid())
        time.sleep(1000)
    os._exit(0)
if os.fork() == 0:
    note(os.getpid())
    time.sleep(1000)
    os._exit(0)
END
"""


@pytest.mark.parametrize("end", ["time.sleep(1000)", "os._exit(3)"])
def test_child_processes_do_not_outlive_the_run(tmp_path: Path, end: str) -> None:
    processes = build_processes(tmp_path)
    others = subprocess.Popen(["sleep", "1000"])
    start_code(processes, "worker-0", LEAVES.replace("END", end))
    noted = processes.run_dir.path / "pids"
    try:
        wait_for(lambda: noted.is_file() and len(noted.read_text().split()) == 5)
        pids = [int(pid) for pid in noted.read_text().split()]
        assert all(map(is_alive, pids))
        wait_for(lambda: "sleep" in end or processes.exit_code("worker-0") == 3)
    finally:
        processes.kill()
    if "exit" in end:  # nothing tells whose it was
        os.killpg(pids.pop(2), signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids)))
    assert others.poll() is None, "what is not of the run goes on"
    others.kill()
    others.wait()


def test_resumed_run_ends_processes_of_a_killed_launcher(tmp_path: Path) -> None:
    processes = build_processes(tmp_path)
    mark = process_watch.build_mark(processes.run_dir.path, "worker-0")
    other = process_watch.build_mark(processes.run_dir.path, "worker-01")
    left, survivor = (
        subprocess.Popen(["sleep", "1000"], env={process_watch.MARK_VARIABLE: value})
        for value in (mark, other)
    )
    environ = Path(f"/proc/{left.pid}/environ")
    wait_for(lambda: mark.encode() in environ.read_bytes())  # set after the fork
    kill_marked(processes.run_dir.path, ["worker-0"])
    assert left.wait(30) == -signal.SIGKILL and survivor.poll() is None
    survivor.kill()
    survivor.wait()


PRINTS = """
import sys, time
for number in range(NUMBER):
    print(f"{number:011d}")
    if number % 1000 == 0:
        time.sleep(0.0001)
print("the cause of death")
"""


def test_a_log_is_bounded_and_keeps_its_last_lines(tmp_path: Path) -> None:
    processes, number = build_processes(tmp_path), 100_000
    log = processes.run_dir.logs / "worker-0.log"
    start_code(processes, "worker-0", PRINTS.replace("NUMBER", str(number)))
    while processes.exit_code("worker-0") is None:
        bound_logs(log.parent, max_bytes=1 << 18, tail_bytes=1 << 16)
        time.sleep(0.002)
    bound_logs(log.parent, max_bytes=1 << 18, tail_bytes=1 << 16)
    assert log.stat().st_blocks * 512 <= 1 << 18
    assert log.read_bytes().startswith(b"[the first ")
    how = processes.explain_exit("worker-0", 1)
    assert "The last line of its log: the cause of death" in how.problem
    processes.kill()


HANGS_UP = """
import os, signal, sys, time
from pathlib import Path
from sightline.launch.processes import Processes, ProcessSpec, collect_signals
from sightline.run import RunDir

run_dir = RunDir(Path(sys.argv[1]))
run_dir.make()
with collect_signals() as signals:
    processes = Processes(run_dir)
    processes.start(ProcessSpec("server", ["1000"], 1, python=sys.argv[2]))
    ignored = [
        line.split()[1] for line in open(f"/proc/{processes.list_pids()['server']}/status")
        if line.startswith("SigIgn")
    ]
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.2)
    processes.kill()
    print(len(signals), int(ignored[0], 16) & 1)
"""


@pytest.mark.parametrize(("is_ignored", "heard"), [(True, "0 1"), (False, "1 0")])
def test_hangup_ignored_by_nohup_stays_ignored(
    tmp_path: Path, is_ignored: bool, heard: str
) -> None:
    sleeps = tmp_path / "sleeps"
    sleeps.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeps.chmod(0o755)
    words = [sys.executable, "-c", HANGS_UP, str(tmp_path / "run"), str(sleeps)]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.stdout.strip() == heard, done.stderr
