"""User code that crashes, hangs or leaks costs its rollouts and its worker, never the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.conftest import SMALL
from loop.jobs import EXAMPLES, sightline, summary
from sightline.monitor import RunDir, read_events
from sightline.monitor.events import by_step
from sightline.trace import read_traces

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

STEPS = 3
TROUBLE = '''
import asyncio, ctypes, os, time
from pathlib import Path
from sightline.envs.color_codeword import ColorCodeword


class Trouble(ColorCodeword):
    """Goes wrong once, in the middle of a rollout."""

    def __init__(self, kind, **args):
        super().__init__(**args)
        self.kind = kind

    async def rollout(self, task, chat):
        done = Path("trouble.done")
        if task.split == "train" and task.index == 2 and not done.exists():
            await chat.send([self._show(task, 0, chat.put)])
            done.touch()
            if self.kind == "crash":
                os._exit(7)
            if self.kind == "fault":
                ctypes.string_at(0)
            if self.kind == "hang":
                while True:
                    pass
            if self.kind == "frozen":
                os.kill(os.getpid(), 19)
            if self.kind == "leak":
                held = [b"x" * (1 << 20) for _ in range(900)]
                await asyncio.sleep(600)
                return len(held)
        return await super().rollout(task, chat)


class Stuck(Trouble):
    """The same as a plain function: its thread never comes back."""

    def rollout(self, task, chat):
        done = Path("trouble.done")
        if task.split == "train" and task.index == 2 and not done.exists():
            done.touch()
            while True:
                time.sleep(0.01)
        said = chat.send([self._show(task, 0, chat.put)])
        return float(len(said.text) + chat.rng.random())
'''


def run_with(home: Path, kind: str, env: str, *words: str) -> tuple[RunDir, str]:
    (home / "trouble.py").write_text(TROUBLE)
    file = (EXAMPLES / "cpu.toml").read_text().replace('name = "color_codeword"', f'name = "{env}"')
    (home / "run.toml").write_text(file)
    done = sightline(
        "rl", "--plain", "run.toml", *SMALL, f"run.steps={STEPS}", "eval.tasks=0",
        "orchestrator.credit=rollout", f"env.args.kind={kind}", "rollout.hang_s=4",
        "rollout.worker_max_gb=0.7", *words, cwd=home,
    )  # fmt: skip
    return RunDir(next((home / "runs").glob("job-*"))), done.stdout


@pytest.mark.parametrize(
    ("kind", "env", "why"),
    [
        ("crash", "trouble:Trouble", "crash: worker-0 ended with 7"),
        ("fault", "trouble:Trouble", "crash: worker-0 was killed by SIGSEGV"),
        ("hang", "trouble:Trouble", "hang: its event loop stood still"),
        ("leak", "trouble:Trouble", "leak: it held"),
        ("stuck", "trouble:Stuck", "hang: a thread has outlived its rollout"),
    ],
)
def test_a_worker_that_user_code_breaks_is_replaced(
    home: Path, kind: str, env: str, why: str
) -> None:
    limit = ("rollout.timeout_s=5",) if kind == "stuck" else ()
    run_dir, said = run_with(home, kind, env, *limit)
    events = list(read_events(run_dir.metrics))
    assert summary(run_dir)["steps"] == STEPS
    lost = [event.values for event in events if event.kind == "lost"]
    assert [event["worker"] for event in lost] == ["worker-0"]
    assert why in lost[0]["reason"] and "worker-0 was replaced" in said
    steps = by_step(events, "step")
    assert steps[STEPS].values["workers_lost"] == {why.partition(":")[0]: 1}
    traces = [t for step in range(1, STEPS + 1) for t in read_traces(run_dir.traces_of(step))]
    broken = [t for t in traces if t.error_kind == "worker_lost"]
    dropped = [event for event in events if event.kind == "dropped"]
    assert len(broken) == sum(e.values["reason"] == "worker_lost" for e in dropped)
    assert broken or kind == "stuck", "the rollouts of the worker are counted"
    assert all(why.partition(":")[0] in t.error for t in broken)


def test_a_worker_that_cannot_start_ends_the_run(home: Path) -> None:
    (home / "late.py").write_text(
        "import sys\n"
        "from sightline.envs.color_codeword import ColorCodeword\n"
        "class Late(ColorCodeword):\n"
        "    def __init__(self, **args):\n"
        "        super().__init__(**args)\n"
        "        if 'process' in sys.argv:\n"
        "            raise RuntimeError('no display here')\n"
    )
    file = (EXAMPLES / "cpu.toml").read_text()
    (home / "run.toml").write_text(file.replace('name = "color_codeword"', 'name = "late:Late"'))
    done = sightline("rl", "--plain", "run.toml", *SMALL, "run.steps=1", cwd=home, check=False)
    assert done.returncode == 2
    assert "worker-0 ended with 1" in done.stderr and "no display here" in done.stderr
