"""Kills the processes of a run on two ranks, again and again, and counts what was lost.

    make chaos KILLS=50            python tests/chaos/chaos.py --kills 50 --seed 0

Each life of the run ends by SIGKILL to one process; some moments are waited for: inside the writing
of a checkpoint, or of published weights. The next life resumes. The seed deals: every five kills
are one of each kind of process, and have one of each kind of moment.
A worker is replaced while the run goes on. At the end the ledger must hold every step once, no
version may have come out with other bits, and no rank may have outlived a failure by 10 seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from watching import find_child, names_of

from sightline.run import RunDir
from sightline.view.events import by_step, read_events

ROOT = Path(__file__).resolve().parents[2]
MAX_S = 10.0
"""No rank may live longer than this after the failure of another process."""
MANY_STEPS = 1_000_000
PATIENCE_S = 600.0
KINDS = ("trainer", "server", "orchestrator", "launcher", "worker-0")
"""Of process. Of the trainer's two ranks each is killed in turn."""
WRITING, OTHERS = ("checkpoint", "publish"), ("step", "start")
"""Moments inside writing are waited for; the seed draws the others."""
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
ranks = 2
checkpoint_every = 2
micro_batch_tokens = 64
[inference]
max_num_seqs = 16
max_model_len = 128
[eval]
tasks = 0
"""


@dataclass
class Kill:
    victim: str
    moment: str
    inside: bool
    """Whether something half written was left behind."""
    died_at: int
    replayed: int = 0
    gone_s: float = 0.0
    """Until the last process of the run had ended."""


@dataclass
class Chaos:
    home: Path
    rng: random.Random
    run: str = "runs/chaos-001"
    seen: dict[int, str] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.home / self.run)

    def prepare(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "loop" / "vowels.py", self.home)
        (self.home / "run.toml").write_text(RUN_FILE.format(steps=MANY_STEPS))
        self.sightline("model", "tiny", "tiny").wait()

    def sightline(self, *words: str) -> subprocess.Popen[bytes]:
        slow = str(Path(__file__).parent / "slow_disk")
        path = os.pathsep.join([slow, *filter(None, [os.environ.get("PYTHONPATH")])])
        log = open(self.home / "output.log", "ab")  # noqa: SIM115
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "sightline", *words],
                cwd=self.home, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip

    def start(self, *overrides: str) -> None:
        words = ["--resume", self.run] if self.run_dir.config.is_file() else ["run.toml"]
        self.process = self.sightline("rl", "--plain", *words, *overrides)

    def kill(self, victim: str, moment: str) -> Kill:
        """Waits for the moment, kills, and waits until nothing of the run is left."""
        assert self.process is not None
        self.await_moment(moment)
        pid = self.process.pid if victim == "launcher" else self.await_child(victim)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        if victim == "worker-0":
            at = self.last_step()
            self.wait(lambda: self.last_step() > at + 1, "a step after a worker was replaced")
            return Kill(victim, moment, False, at)
        while names_of(self.run):
            self.check_patience(killed, "the end of all processes")
            time.sleep(0.02)
        gone_s = time.monotonic() - killed
        code = self.process.wait()
        assert code == (-signal.SIGKILL if victim == "launcher" else 2), self.words()
        folder = {"checkpoint": self.run_dir.checkpoints, "publish": self.run_dir.weights}
        inside = moment in folder and bool(list(folder[moment].glob(".*.part")))
        return Kill(victim, moment, inside, self.last_step(), self.uncovered(), gone_s)

    def await_moment(self, moment: str) -> None:
        first = self.last_step()
        if moment == "start":
            time.sleep(self.rng.uniform(0.5, 8.0))
            return
        self.wait(lambda: self.last_step() > first, "a step")
        if moment == "step":
            time.sleep(self.rng.uniform(0.0, 1.5))
        else:
            where = self.run_dir.checkpoints if moment == "checkpoint" else self.run_dir.weights
            self.wait(lambda: any(where.glob(".*.part/*")), f"{moment} to begin", 0.001)
            time.sleep(self.rng.uniform(0.0, 0.1))

    def await_child(self, name: str) -> int:
        assert self.process is not None
        parent = self.process.pid
        self.wait(lambda: find_child(parent, name) is not None, f"the process {name}")
        pid = find_child(parent, name)
        assert pid is not None
        return pid

    def wait(self, there: Callable[[], bool], what: str, pause_s: float = 0.05) -> None:
        began = time.monotonic()
        while not there():
            assert self.process is not None and self.process.poll() is None, self.words()
            self.check_patience(began, what)
            time.sleep(pause_s)

    def check_patience(self, since: float, what: str) -> None:
        if time.monotonic() - since > PATIENCE_S:
            raise SystemExit(f"waited in vain for {what}\n{self.words()}")

    def last_step(self) -> int:
        return max(by_step(read_events(self.run_dir.metrics), "train"), default=0)

    def uncovered(self) -> int:
        """Steps that the next life trains again."""
        found = sorted(self.run_dir.checkpoints.glob("step_*"))
        covered = int(found[-1].name.removeprefix("step_")) if found else 0
        return max(0, max(self.ledger(), default=0) - covered)

    def ledger(self) -> dict[int, str]:
        """Each step and its batch, which is the one that it had in every life before."""
        if not self.run_dir.ledger.is_file():
            return {}
        lines = [json.loads(line) for line in self.run_dir.ledger.read_bytes().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), lines
        for line in lines:
            known = self.seen.setdefault(line["step"], line["batch"])
            assert known == line["batch"], f"step {line['step']} was trained on another batch"
        return {line["step"]: line["batch"] for line in lines}

    def words(self) -> str:
        return (self.home / "output.log").read_text(errors="replace")[-3000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "chaos")
    args = parser.parse_args()
    chaos = Chaos(args.home.resolve(), random.Random(args.seed))
    chaos.prepare()
    began = time.monotonic()
    try:
        play(chaos, args.kills)
        finish(chaos)
    finally:
        if chaos.process is not None and chaos.process.poll() is None:
            chaos.process.terminate()
            chaos.process.wait()
    report(chaos, time.monotonic() - began)


def deal(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Who is killed, and when: round by round every kind of process and every kind of moment.

    In every other round it is trainer and launcher that are killed inside writing: with them the
    writer ends at once, and leaves half of it behind.
    """
    ranks = ["trainer", "trainer-1"]
    rng.shuffle(ranks)
    for number in itertools.count():
        near, far = ["trainer", "launcher"], ["server", "orchestrator"]
        writing, others = rng.sample(WRITING, 2), rng.sample(OTHERS, 2)
        moments = dict(zip([*near, *far], [*writing, *others], strict=True))
        if number % 2:
            moments = dict(zip([*far, *near], [*writing, *others], strict=True))
        for kind in rng.sample(KINDS, len(KINDS)):
            victim = ranks[number // 2 % 2] if kind == "trainer" else kind
            yield victim, moments.get(kind, "step")


def play(chaos: Chaos, num: int) -> None:
    for victim, moment in itertools.islice(deal(chaos.rng), num):
        if chaos.process is None or chaos.process.poll() is not None:
            chaos.start()
        kill = chaos.kill(victim, moment)
        chaos.kills.append(kill)
        inside = ", half written" if kill.inside else ""
        print(
            f"{len(chaos.kills):3d}  {victim} at {kill.moment} after step {kill.died_at}{inside}: "
            f"{kill.replayed} to replay, all gone after {kill.gone_s:.1f} s",
            flush=True,
        )


def finish(chaos: Chaos) -> None:
    """Lets the run come to its end, and holds it to its promises."""
    if chaos.process is not None and chaos.process.poll() is None:
        chaos.process.send_signal(signal.SIGTERM)
        assert chaos.process.wait(PATIENCE_S) == 0, chaos.words()
    last = max(chaos.seen | chaos.ledger(), default=0) + 2
    chaos.start(f"run.steps={last}")
    assert chaos.process is not None and chaos.process.wait(PATIENCE_S) == 0, chaos.words()
    assert list(chaos.ledger()) == list(range(1, last + 1)), "every step once"
    history = (chaos.run_dir.weights / "history.jsonl").read_bytes().splitlines()
    assert all(json.loads(line)["epoch"] == 0 for line in history), "replayed weights are bit-equal"
    late = [kill for kill in chaos.kills if kill.gone_s > MAX_S]
    assert not late, f"outlived by more than {MAX_S:.0f} s: {late}"
    for moment in ("checkpoint", "publish"):
        kills = [kill for kill in chaos.kills if kill.moment == moment]
        assert not kills or any(kill.inside for kill in kills), f"no kill inside {moment}"


def report(chaos: Chaos, seconds: float) -> None:
    rows: dict[tuple[str, str], list[Kill]] = defaultdict(list)
    for kill in chaos.kills:
        rows[kill.victim, kill.moment].append(kill)
    print("\n| killed | at | kills | half written | resumed | steps replayed | all gone after |")
    print("|---|---|---|---|---|---|---|")
    for (victim, moment), kills in sorted(rows.items()):
        gone = "replaced" if victim == "worker-0" else f"{max(k.gone_s for k in kills):.1f} s"
        print(
            f"| {victim} | {moment} | {len(kills)} | {sum(k.inside for k in kills)} "
            f"| {len(kills)} | {sum(k.replayed for k in kills)} | {gone} |"
        )
    print(
        f"\n{len(chaos.kills)} kills in {seconds:.0f} s; the ledger holds steps 1 to "
        f"{len(chaos.ledger())}, every one once; every replayed version has the bits that it had"
    )


if __name__ == "__main__":
    main()
