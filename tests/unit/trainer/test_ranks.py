"""Messages between a trainer's ranks, over real sockets, with threads as processes."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from sightline.errors import ProcessFailed
from sightline.launch.processes import reserve_port
from sightline.trainer.ranks import FollowerChannel, LeadChannel, RankInfo
from sightline.trainer.watchdog import STALLED_EXIT_CODE, StallWatchdog
from sightline.transport.zmq_channel import Spoke, derive_spoke_key
from sightline.wire import rank_messages as wire
from sightline.wire.codec import get_release
from sightline.wire.rank_messages import (
    RankAssignment,
    RankFailed,
    RankReady,
    RankStarted,
    rank_process_name,
)
from sightline.wire.weights import WeightFile


class Ends:
    """Records which rank ended which, without ending the process."""

    def __init__(self) -> None:
        self.seen: queue.SimpleQueue[tuple[int, RankFailed]] = queue.SimpleQueue()

    def __call__(self, own: int, failed: RankFailed) -> None:
        self.seen.put((own, failed))

    def take(self, num: int) -> dict[int, RankFailed]:
        return dict(self.seen.get(timeout=10) for _ in range(num))

    def take_all(self, ranks: set[int]) -> list[RankFailed]:
        """Wait until each of `ranks` was ended, some perhaps more than once."""
        messages: list[tuple[int, RankFailed]] = []
        while {own for own, _ in messages} != ranks:
            messages.append(self.seen.get(timeout=10))
        return [failed for _, failed in messages]


@contextmanager
def ranks(
    size: int, secrets: dict[int, str] | None = None, of: int = 0, **limits: float
) -> Iterator[tuple[LeadChannel, list[FollowerChannel]]]:
    """Return rank 0 and the others up to `size`, of `of` in total."""
    channel = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}"
    ends = Ends()
    lead = LeadChannel(RankInfo(0, of or size, "", channel, "s"), ends, **limits)
    others = [
        FollowerChannel(RankInfo(rank, size, "", channel, (secrets or {}).get(rank, "s")), ends)
        for rank in range(1, size)
    ]
    lead.ends, lead.address = ends, channel  # type: ignore[attr-defined]
    yield lead, others
    for link in (*others, lead):
        link.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def shares(step: int, num: int) -> list[RankAssignment]:
    return [RankAssignment(step, f"d{rank}", [], []) for rank in range(1, num + 1)]


def test_every_rank_gets_its_own_share_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(3) as (lead, others):
        for other in others:
            other.report_ready()
        lead.wait_until_loaded(timeout_s=10)
        # Answers arrive while others are still being sent, because this thread sends slowly.
        send = lead._send
        monkeypatch.setattr(lead, "_send", lambda *words: (send(*words), time.sleep(0.002)))
        steps = range(1, 31)
        for step in steps:
            lead.send_shares(shares(step, 2))
        lead.announce_end()
        received_shares = [
            [(share.step, share.digest) for share in other.shares()] for other in others
        ]
        assert received_shares == [[(step, name) for step in steps] for name in ("d1", "d2")]
        assert lead.ends.seen.empty()  # type: ignore[attr-defined]


def test_ranks_that_never_start_are_named_before_any_collective() -> None:
    channel = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}"
    lead = LeadChannel(RankInfo(0, 4, "", channel, "s"), Ends())
    started = FollowerChannel(RankInfo(2, 4, "", channel, "s"), Ends())
    wait_until(lambda: 2 in lead._started)
    with pytest.raises(ProcessFailed, match=r"ranks \[1, 3\] of 4 are missing"):
        lead.wait_for_start(timeout_s=0.2)
    for one in (started, lead):
        one.close()


def test_process_is_only_the_rank_of_its_name() -> None:
    with ranks(2) as (lead, _):
        lead.wait_for_start(timeout_s=30)
        two, seven = (
            Spoke(lead.address, name, derive_spoke_key("s", name))
            for name in ("trainer-2", "trainer-7")
        )
        two.send(wire.encode(RankReady(0)))
        seven.send(wire.encode(RankFailed(1, "gone")))
        wait_until(lambda: len(lead._strangers) == 2)
        with pytest.raises(ProcessFailed, match=r"ranks \[1\] of 2 are missing") as caught:
            lead.wait_until_loaded(timeout_s=0.2)
        assert "rejected: trainer-" in caught.value.problem
        assert lead.ends.seen.empty()
        for stranger in (two, seven):
            stranger.close()


def test_checkpoint_files_must_belong_to_its_step() -> None:
    """A rank that has written the next checkpoint has already reported both."""

    def file(step: int, rank: int) -> WeightFile:
        return WeightFile(f"rank_{rank}", step, f"{step}" * 64)

    with ranks(3) as (lead, others):
        lead.wait_for_start(timeout_s=30)
        for step in (1, 2):
            others[0].collect_files(step, [file(step, 1)])
        others[1].collect_files(1, [file(1, 2)])
        wait_until(lambda: (2, 1) in lead._written)
        assert lead.collect_files(1, [file(1, 0)]) == [file(1, 0), file(1, 1), file(1, 2)]
        others[1].collect_files(2, [file(2, 2)])
        assert lead.collect_files(2, [file(2, 0)]) == [file(2, 0), file(2, 1), file(2, 2)]
        assert not lead._written


def test_rank_with_another_secret_is_rejected() -> None:
    with ranks(2, {1: "guess"}) as (lead, others):
        others[0].report_ready()
        with pytest.raises(ProcessFailed, match=r"ranks \[1\] of 2 are missing") as error:
            lead.wait_until_loaded(timeout_s=0.5)
        assert "secret" in error.value.fix


def test_ranks_that_start_from_different_steps_are_refused() -> None:
    with ranks(3) as (lead, others):
        for other, step in zip(others, (4, 2), strict=True):
            other.report_ready(step)
        with pytest.raises(ProcessFailed, match=r"rank 0 starts from step 4, others from {2: 2}"):
            lead.wait_until_loaded(4, timeout_s=10)


@pytest.mark.parametrize("step", [1, 3, 4])
def test_share_of_another_step_ends_all_ranks(step: int) -> None:
    with ranks(3) as (lead, others):
        for other in others:
            other.report_ready(1)
        lead.wait_until_loaded(1, timeout_s=10)

        def send_shares() -> None:
            with suppress(ProcessFailed):  # nobody takes it, and here nobody is ended
                lead.send_shares(shares(step, 2))

        threading.Thread(target=send_shares, daemon=True).start()
        ended = lead.ends.take_all({0, 1, 2})  # type: ignore[attr-defined]
        assert any(f"received RankAssignment {step}, not 2" in failed.problem for failed in ended)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_rank_failure_reaches_every_other_rank(culprit: int) -> None:
    with ranks(3) as (lead, others):
        for other in others:
            other.report_ready()
        lead.wait_until_loaded(timeout_s=10)
        everyone: list[LeadChannel | FollowerChannel] = [lead, *others]
        everyone[culprit].fail("RuntimeError: out of luck")
        ended = lead.ends.take(2)  # type: ignore[attr-defined]
        assert set(ended) == {0, 1, 2} - {culprit}
        assert set(ended.values()) == {RankFailed(culprit, "RuntimeError: out of luck")}


def test_ranks_that_miss_their_share_or_write_are_named() -> None:
    with ranks(2, of=3, deliver_s=0.2, write_s=0.2) as (lead, others):
        others[0].report_ready()
        # Rank 2 reports that it is ready, and never receives.
        deaf = Spoke(lead.address, name := rank_process_name(2), derive_spoke_key("s", name))
        for message in (RankStarted(get_release()), RankReady(0)):
            deaf.send(wire.encode(message))
        lead.wait_until_loaded(timeout_s=30)
        # On a slow machine, the other rank may be named too.
        with pytest.raises(
            ProcessFailed, match=r"2\] of 3 have not received their share of step 1"
        ):
            lead.send_shares(shares(1, 2))
        others[0].collect_files(4, [WeightFile("rank_1", 1, "1")])
        wait_until(lambda: (4, 1) in lead._written)
        with pytest.raises(ProcessFailed, match=r"ranks \[2\] of 3 have not written .* step 4"):
            lead.collect_files(4, [WeightFile("rank_0", 1, "0")])
        deaf.close()


PROCESS = """
import sys, time
from sightline.trainer.ranks import FollowerChannel, LeadChannel, RankInfo
from sightline.transport import message_stream, zmq_channel
from sightline.wire import rank_messages as wire
from sightline.wire.codec import get_release
zmq_channel.TICK_S = 0.05
who, address = sys.argv[1:]
lead = LeadChannel(RankInfo(0, 2, "", address, "s")) if who == "rank 0" else None
if lead is not None:
    other = zmq_channel.Spoke(address, "trainer-1", zmq_channel.derive_spoke_key("s", "trainer-1"))
    other.send(wire.encode(wire.RankStarted(get_release())))
    lead.wait_for_start(30.0)
    other._on_end = lambda: None  # as the kill of a process does
    other.close()
message_stream.MAX_SILENCE_S = 0.2
if lead is None:
    follower = FollowerChannel(RankInfo(1, 2, "", address, "s"))
time.sleep(60)
"""


@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
def test_rank_ends_when_another_is_lost(who: str) -> None:
    address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}"
    words = [sys.executable, "-c", PROCESS, who, address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "was silent for" in done.stderr, done.stderr


def test_idle_process_is_not_stuck() -> None:
    watchdog = StallWatchdog()  # without a limit nothing ends the process
    moved = threading.Event()
    moved.wait(0.05)
    assert not watchdog.problem()
    watchdog.enter("step 3")
    moved.wait(0.05)
    assert "in step 3" in watchdog.problem()
    watchdog.enter("the export", min_limit_s=60)
    moved.wait(0.05)
    assert not watchdog.problem(), "it is given longer than a step"
    watchdog.enter("step 4")
    moved.wait(0.05)
    assert "in step 4" in watchdog.problem(), "a step is not given longer after an export"
    watchdog.idle()
    assert not watchdog.problem()


STUCK = """
import time
from sightline.trainer.watchdog import StallWatchdog
watchdog = StallWatchdog(0.2, tell=lambda problem: print(problem, flush=True))
watchdog.enter("the export", min_limit_s=60)
time.sleep(0.5)
watchdog.idle()
time.sleep(0.5)
watchdog.enter("step 3")
time.sleep(60)
"""


def test_stuck_process_tells_its_activity_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == STALLED_EXIT_CODE
    assert "stuck" in done.stdout and "in step 3" in done.stdout
    assert "in step 3. The stacks of all threads are above" in done.stderr.splitlines()[-1]


LISTENER_FAILS = """
import os, threading, time
from sightline.trainer import ranks

class Garbled(ranks.RankChannel):
    def take_next(self):
        raise RuntimeError("a garbled share")

    def fail(self, problem):
        told.set()
        time.sleep(0.5)

told, channel = threading.Event(), Garbled()
channel._start_listening()
told.wait()
channel.claim_end()  # as the loop does when the ranks that were told are gone
os._exit(3)
"""


def test_listener_failure_is_not_hidden_by_its_consequences() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTENER_FAILS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "RuntimeError: a garbled share" in done.stderr
