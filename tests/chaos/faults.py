"""Faults of a run: the kind of each, the part that it hits, and the expected reaction."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from chaos_run import MAX_S, PATIENCE_S
from testbeds import BUCKET_URL, DISKS, FOLDERS, Testbed

WENT_ON, RESUMED = "went on", "ended and resumed"
RANKS = ("trainer", "trainer-1")
PROCESSES = ("server", "orchestrator", "worker-0", *RANKS)


@dataclass(frozen=True)
class Survived:
    outcome: str
    seconds: float
    """Seconds until the fault was reported, all processes had ended, or the next step trained."""
    detail: str = ""


@dataclass(frozen=True)
class Fault:
    kind: str
    what: str
    happen: Callable[[Testbed], Survived]
    testbed: str = "disk"
    """The testbed that the fault needs."""


# --- processes


def kill(victim: str, moment: str) -> Callable[[Testbed], Survived]:
    def happen(testbed: Testbed) -> Survived:
        run = testbed.run
        await_moment(testbed, moment)
        os.kill(run.pid_of(victim), signal.SIGKILL)
        began, first = time.monotonic(), run.last_step()
        assert run.process is not None
        if victim in ("worker-0", "server"):
            # If a server is killed before it ever answered, the run ends.
            while run.process.poll() is None and run.last_step() < first + 2:
                run.check_patience(began, "two steps or an end")
                time.sleep(0.05)
            if run.process.poll() is None:
                return Survived(WENT_ON, time.monotonic() - began, "replaced")
            began = time.monotonic()
        code = run.process.wait()
        gone_s = run.wait_until_gone() + time.monotonic() - began
        run.expect(code == (-signal.SIGKILL if victim == "launcher" else 2), "its exit code")
        run.expect(gone_s < MAX_S, f"all processes end within {MAX_S:.0f} s of a failure")
        if victim != "launcher":
            run.expect(victim in run.find_cause(), "the cause names who was killed")
        folder = {"checkpoint": run.run_dir.checkpoints, "publish": run.run_dir.weights}
        is_half = moment in folder and bool(list(folder[moment].glob(".*.part")))
        left = f"{run.count_uncovered()} to replay" + ", half written" * is_half
        return resume(testbed, gone_s, left)

    return happen


def await_moment(testbed: Testbed, moment: str) -> None:
    run = testbed.run
    if moment == "start":  # of a life of its own
        run.stop()
        run.start()
        time.sleep(run.rng.uniform(0.5, 8.0))
    elif moment == "step":
        time.sleep(run.rng.uniform(0.0, 1.5))
    else:
        where = run.run_dir.checkpoints if moment == "checkpoint" else run.run_dir.weights
        run.wait(lambda: any(where.glob(".*.part/*")), f"{moment} begins", 0.001)
        time.sleep(run.rng.uniform(0.0, 0.1))


def restart_machine(testbed: Testbed) -> Survived:
    time.sleep(testbed.run.rng.uniform(0.0, 1.5))
    testbed.run.kill_all()
    return resume(testbed, 0.0, f"{testbed.run.count_uncovered()} to replay")


def stop_process(victim: str) -> Callable[[Testbed], Survived]:
    """Stop a process. It is reported, and continues."""

    def happen(testbed: Testbed) -> Survived:
        run, pid = testbed.run, testbed.run.pid_of(victim)
        num_words = len(run.words())
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            while not any(
                victim in line and "stopped" in line
                for line in run.words()[num_words:].splitlines()
            ):
                passed = time.monotonic() - began
                run.expect(passed < MAX_S, f"{victim} is named within {MAX_S:.0f} s")
                time.sleep(0.05)
            named_s = time.monotonic() - began
        finally:
            os.kill(pid, signal.SIGCONT)
        run.wait_for_step(2)
        return Survived(WENT_ON, named_s, "named")

    return happen


def slow_down(victim: str) -> Callable[[Testbed], Survived]:
    """Give a process a fifth of a processor for five seconds."""

    def happen(testbed: Testbed) -> Survived:
        pid, began = testbed.run.pid_of(victim), time.monotonic()
        while time.monotonic() - began < 5.0:
            for number, pause_s in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.05)):
                os.kill(pid, number)
                time.sleep(pause_s)
        began = time.monotonic()
        testbed.run.wait_for_step(2)
        return Survived(WENT_ON, time.monotonic() - began)

    return happen


# --- disks and files


def spoil_disk(how: str, moment: str, *words: str) -> Callable[[Testbed], Survived]:
    """The disk of the run gets full at a moment, loses its inodes, or becomes read-only."""

    def happen(testbed: Testbed) -> Survived:
        await_moment(testbed, moment)
        with getattr(testbed.disk, how)():
            survived = end_with(testbed, *words)
        return resume(testbed, survived.seconds, survived.detail)

    return happen


def spoil_folder(folder: str, how: str, *words: str) -> Callable[[Testbed], Survived]:
    """A folder of the run is on a disk of its own, which gets full or becomes read-only."""

    def happen(testbed: Testbed) -> Survived:
        with getattr(testbed.folder_disks[folder], how)():
            survived = end_with(testbed, *words)
        return resume(testbed, survived.seconds, survived.detail)

    return happen


def forbid_writing(folder: str) -> Callable[[Testbed], Survived]:
    def happen(testbed: Testbed) -> Survived:
        with testbed.disk.locked(testbed.run.run_dir.path / folder):
            survived = end_with(testbed, folder)
        return resume(testbed, survived.seconds, survived.detail)

    return happen


def end_with(testbed: Testbed, *words: str) -> Survived:
    """Check that the run ends with a cause that contains one of the words.

    It resumes after the fault.
    """
    run, began = testbed.run, time.monotonic()
    assert run.process is not None
    code = run.process.wait(PATIENCE_S)
    seconds = time.monotonic() - began
    run.expect(code == 2, f"its exit code is 2, not {code}")
    run.expect(run.wait_until_gone() < MAX_S, "all processes end")
    cause = run.find_cause()
    run.expect(any(word in cause for word in words), f"the cause has one of {words}: {cause}")
    return Survived(RESUMED, seconds, cause[:100])


FILES = {
    "run file": "config.toml",
    "digests of the model": "model.json",
    "orchestrator's state": "checkpoints/orchestrator.json",
    "waiting batch": "batches/step_*.msgpack",
    "tensors of a checkpoint": "checkpoints/step_*/rank_*.safetensors",
    "manifest of a checkpoint": "checkpoints/step_*/manifest.json",
    "published weights": "weights/v*/*.safetensors",
    "manifest of weights": "weights/v*/manifest.json",
    "history of weights": "weights/history.jsonl",
    "ledger": "ledger.jsonl",
    "metrics": "metrics.jsonl",
    "image": "media/[0-9a-f][0-9a-f]/*/*",
    "traces": "traces/step_*.msgpack",
}


def damage(pattern: str, how: str) -> Callable[[Testbed], Survived]:
    """Damage the newest file of a kind between two starts.

    The process that reads it must name it. After the file is restored, the run resumes.
    """

    def happen(testbed: Testbed) -> Survived:
        run = testbed.run
        run.wait(lambda: any(run.run_dir.path.glob(pattern)), f"there is {pattern}")
        run.kill_all()
        run.remember_batches()
        candidates = sorted(file for file in run.run_dir.path.glob(pattern) if file.is_file())
        file, copy = candidates[-1], run.home / "copy"
        shutil.copy2(file, copy)
        spoil(file, how, run.rng)
        before = file.read_bytes() if file.exists() else None
        run.start()
        assert run.process is not None
        first, began = run.last_step(), time.monotonic()
        while run.process.poll() is None and run.last_step() < first + 2:
            run.check_patience(began, "a step or an end")
            time.sleep(0.05)
        seconds = time.monotonic() - began
        if run.process.poll() is None:
            return Survived(WENT_ON, seconds, file.name)
        run.expect(run.process.poll() == 2, "its exit code")
        run.expect(run.wait_until_gone() < MAX_S, "all processes end")
        cause = run.find_cause()
        names = (file.name, file.parent.name)
        run.expect(any(name in cause for name in names), f"the cause names {file}: {cause}")
        if before is not None and file.exists():
            run.expect(file.read_bytes() == before, "a damaged file stays as it is")
        shutil.copy2(copy, file)
        return resume(testbed, seconds, cause[:100])

    return happen


def spoil(file: Path, how: str, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if how == "deleted":
        file.unlink()
        return
    if how == "torn":
        data = data[: len(data) // 2]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.chmod(0o600)
    file.write_bytes(data)


# --- clocks and servers


def step_clock(offset: str) -> Callable[[Testbed], Survived]:
    def happen(testbed: Testbed) -> Survived:
        testbed.set_clock(offset)
        began = time.monotonic()
        testbed.run.wait_for_step(2)
        return Survived(WENT_ON, time.monotonic() - began)

    return happen


def disturb(how: str) -> Callable[[Testbed], Survived]:
    """Cut or slow down the server's connections. The same answers must arrive in the end."""

    def happen(testbed: Testbed) -> Survived:
        began = time.monotonic()
        with testbed.proxy.disturbed(how):
            testbed.run.wait_for_step(1)
        testbed.run.wait_for_step(1)
        return Survived(WENT_ON, time.monotonic() - began)

    return happen


def take_down_store(testbed: Testbed) -> Survived:
    """The object store answers no request until the retries have ended."""
    with testbed.proxy.disturbed("down"):
        survived = end_with(testbed, BUCKET_URL)
    return resume(testbed, survived.seconds, survived.detail)


def answer_wrongly(how: str) -> Callable[[Testbed], Survived]:
    """Return a fault: the server answers wrongly, and the run ends before it trains on that."""

    def happen(testbed: Testbed) -> Survived:
        with testbed.proxy.disturbed(how):
            survived = end_with(testbed, "answer", "weights", "logprob", "server")
        return resume(testbed, survived.seconds, survived.detail)

    return happen


def resume(testbed: Testbed, seconds: float, detail: str) -> Survived:
    testbed.run.ensure_running()
    return Survived(RESUMED, seconds, detail)


def list_faults() -> Iterator[Fault]:
    for victim in ("launcher", "server", "orchestrator", *RANKS):
        for moment in ("step", "start", "checkpoint", "publish"):
            yield Fault("kill", f"{victim} at {moment}", kill(victim, moment))
    yield Fault("kill", "worker-0 at step", kill("worker-0", "step"))
    for victim in ("launcher", "orchestrator", "trainer"):
        yield Fault("compared kill", victim, kill(victim, "step"), testbed="compared")
    yield Fault("restart of the machine", "all at once", restart_machine)
    for victim in PROCESSES:
        yield Fault("stopped", victim, stop_process(victim))
        yield Fault("slow", victim, slow_down(victim))
    for moment in ("step", "checkpoint", "publish"):
        yield Fault("disk full", f"the run's at {moment}",
                    spoil_disk("filled", moment, "space", "disk"))  # fmt: skip
    yield Fault("no inodes", "the run's", spoil_disk("without_inodes", "step", "inodes"))
    yield Fault("read-only", "the run's", spoil_disk("failed", "step", "Read-only"))
    for folder in DISKS:
        yield Fault("disk full", folder, spoil_folder(folder, "filled", folder))
        # An administrator cannot make logs read-only, since its files are always open.
        how = "failed" if folder == "logs" else "read_only"
        yield Fault("read-only", folder, spoil_folder(folder, how, folder))
    for folder in FOLDERS:
        yield Fault("no permission", folder, forbid_writing(folder))
    for name, pattern in FILES.items():
        for how in ("flipped bit", "torn", "deleted"):
            yield Fault(how, name, damage(pattern, how))
    for how in ("slow answers", "cut", "refusals", "stale lists"):
        yield Fault("object store", how, disturb(how), testbed="object store")
    yield Fault("object store", "down", take_down_store, testbed="object store")
    for offset in ("+2h", "-2h"):
        yield Fault("clock", offset, step_clock(offset), testbed="clock")
    for how in ("cut", "slow answers", "refusals"):
        yield Fault("connection", how, disturb(how), testbed="proxy")
    for how in (
        "garbage", "no choices", "logprob over 0", "too many tokens", "replaced token",
        "finish reason", "version 999999", "another digest",
    ):  # fmt: skip
        yield Fault("wrong answer", how, answer_wrongly(how), testbed="proxy")


def deal_faults(
    rng: random.Random, num: int, kinds: set[str], missing: dict[str, str]
) -> list[Fault]:
    """Return `num` faults, taking the kinds in turn, so that even a few cover many kinds."""
    decks: dict[str, list[Fault]] = {}
    for fault in list_faults():
        names = {fault.kind, f"{fault.kind}: {fault.what}"}
        if fault.kind not in missing and (not kinds or names & kinds):
            decks.setdefault(fault.kind, []).append(fault)
    order = sorted(decks)
    rng.shuffle(order)
    for deck in decks.values():
        rng.shuffle(deck)
    hands = {kind: cycle(deck) for kind, deck in decks.items()}
    return [next(hands[kind]) for kind, _ in zip(cycle(order), range(num), strict=False)]
