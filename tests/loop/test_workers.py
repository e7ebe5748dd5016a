"""User code that crashes, hangs or leaks costs its rollouts and its worker, never the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from shards import take_first

from loop.jobs import sightline, summary
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

STEPS = 3
TROUBLE = '''
import asyncio, ctypes, os, time
from pathlib import Path
from sightline.envs.color_codeword import ColorCodeword


class Trouble(ColorCodeword):
    """Goes wrong once, in the middle of a rollout; earns something at random."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def is_time(self, task):
        done = Path("trouble.done")
        if task.split != "train" or task.index != 2 or done.exists():
            return False
        done.write_text(str(os.getpid()))
        return True

    async def rollout(self, task, chat):
        await chat.send([self._show(task, 0, chat.put)])
        if self.is_time(task):
            if self.kind == "crash":
                os._exit(7)
            if self.kind == "exit":
                os._exit(0)
            if self.kind == "fault":
                ctypes.string_at(0)
            if self.kind == "hang":
                while True:
                    pass
            if self.kind == "leak":
                held = [b"x" * (1 << 20) for _ in range(900)]
                await asyncio.sleep(600)
                return len(held)
        return chat.rng.random()


class Stuck(Trouble):
    """The same as a plain function: its thread never comes back."""

    def rollout(self, task, chat):
        chat.send([self._show(task, 0, chat.put)])
        while self.is_time(task):
            time.sleep(1e9)
        done = Path("trouble.done")
        # Later rollouts wait for the next worker. Without one, the run would not end.
        while task.index > 3 and done.exists() and done.read_text() == str(os.getpid()):
            time.sleep(0.05)
        return chat.rng.random()
'''
RUN = """
[run]
name = "job"
[model]
path = "models/tiny"
[env]
name = "NAME"
[rollout]
workers = 1
max_tokens = 4
worker_hang_timeout_s = 4
worker_max_memory_gb = 0.7
[orchestrator]
groups_per_step = 2
group_size = 4
[eval]
tasks = 0
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained tiny model, which is enough for these tests."""
    folder = tmp_path_factory.mktemp("models")
    sightline("model", "tiny", "tiny", cwd=folder)
    return folder


@pytest.fixture
def home(models: Path, tmp_path: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def write_run(home: Path, module: str, code: str, name: str) -> None:
    (home / f"{module}.py").write_text(code)
    (home / "run.toml").write_text(RUN.replace("NAME", f"{module}:{name}"))


@pytest.mark.parametrize(
    ("kind", "env", "why"),
    take_first([
        ("crash", "Trouble", "crash: worker-0 ended with 7"),
        ("exit", "Trouble", "crash: worker-0 ended with 0"),
        ("fault", "Trouble", "crash: worker-0 was killed by SIGSEGV"),
        ("hang", "Trouble", "hang: its event loop was blocked"),
        ("leak", "Trouble", "leak: "),
        ("stuck", "Stuck", "hang: user code has outlived its rollout"),
    ], 1),
)  # fmt: skip
def test_worker_broken_by_user_code_is_replaced(home: Path, kind: str, env: str, why: str) -> None:
    write_run(home, "trouble", TROUBLE, env)
    limit = ("rollout.timeout_s=15",) if kind == "stuck" else ()
    words = ("run.toml", f"run.steps={STEPS}", f"env.args.kind={kind}", *limit)
    output = sightline("rl", "--plain", *words, cwd=home).stdout
    run_dir = RunDir(next((home / "runs").glob("job-*")))
    events = list(read_events(run_dir.metrics))
    assert summary(run_dir)["steps"] == STEPS
    lost = [event.values for event in events if event.kind == "lost"]
    assert [event["worker"] for event in lost] == ["worker-0"]
    assert why in lost[0]["reason"] and "worker-0 was replaced" in output
    steps = by_step(events, "step")
    assert steps[STEPS].values["workers_lost"] == {why.partition(":")[0]: 1}
    traces = [t for step in range(1, STEPS + 1) for t in read_traces(run_dir.traces_of(step))]
    broken = [t for t in traces if t.error_kind == "worker_lost"]
    dropped = [event for event in events if event.kind == "dropped"]
    assert len(broken) == sum(e.values["reason"] == "worker_lost" for e in dropped)
    assert broken or kind == "stuck", "the rollouts of the worker are counted"
    assert all(why.partition(":")[0] in t.error for t in broken)


LATE = """
import sys
from sightline.envs.color_codeword import ColorCodeword


class Late(ColorCodeword):
    def __init__(self):
        super().__init__()
        if "process" in sys.argv:
            raise RuntimeError("no display here")
"""


def test_worker_startup_failure_ends_the_run(home: Path) -> None:
    write_run(home, "late", LATE, "Late")
    done = sightline("rl", "--plain", "run.toml", "run.steps=1", cwd=home, check=False)
    assert done.returncode == 2
    assert "worker-0 ended with 1" in done.stderr and "no display here" in done.stderr
