"""The ranks of a trainer: what they tell one another, and how they end together.

    rank r --here--> rank 0        before any collective: who is missing is named
    rank r --hello k--> rank 0     its model is loaded, from the checkpoint of step k
    rank 0 --share k--> rank r     a thread of r takes it, whatever r computes meanwhile
      waits for: `taken` of every rank, DELIVER_S at most     unblocked by: those threads
    rank r --failed--> rank 0 --failed--> every rank          each ends at once, and says why

A rank that waits in a collective for one that failed cannot be reached there: the thread that
listens ends the process.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sightline.errors import ProcessFailed, WireError
from sightline.pixels import open_shared_patches
from sightline.transport.zmq_channel import Hub, Spoke
from sightline.wire import rank_messages as wire
from sightline.wire.rank_messages import (
    EXIT_OTHER_RANK_FAILED,
    AssignmentReceived,
    NoMoreWork,
    RankAssignment,
    RankFailed,
    RankMessage,
    RankReady,
    RankStarted,
    ShardWritten,
)
from sightline.wire.weights import WeightFile

MEET_S = 600.0
"""How long the ranks of a run may take to start."""
GATHER_S = 600.0
"""How long they may take longer than rank 0 to load their models."""
DELIVER_S = 60.0
WRITE_S = 3600.0
"""How long a rank may take to write its part of a checkpoint."""


@dataclass(frozen=True)
class RankInfo:
    """Which of how many, and where they meet."""

    rank: int = 0
    size: int = 1
    meet: str = ""
    """host:port of torch.distributed."""
    channel: str = ""
    """Address of rank 0's channel."""
    secret: str = ""
    """What the ranks of a run know one another by."""
    bind: str = ""
    """What rank 0 binds, where that is not `channel`."""

    @property
    def is_lead(self) -> bool:
        return self.rank == 0


SINGLE_RANK = RankInfo()


def exit_for_failure(own: int, failed: RankFailed) -> None:
    """Ends this process because of another's failure."""
    words = f"rank {own} ends because rank {failed.rank} failed: {failed.problem}"
    print(words, file=sys.stderr, flush=True)
    os._exit(EXIT_OTHER_RANK_FAILED)


def exit_on_error(channel: LeadChannel | FollowerChannel, error: Exception) -> None:
    """Ends this process because its own end of the channel failed, which nobody waits for."""
    channel.fail(f"{type(error).__name__}: {error}")
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


class LeadChannel:
    """Rank 0's end of the channel."""

    def __init__(
        self, ranks: RankInfo, end: Callable[[int, RankFailed], None] = exit_for_failure
    ) -> None:
        self._ranks, self._end = ranks, end
        self._hub = Hub(ranks.bind or ranks.channel, ranks.secret)
        self._others = set(range(1, ranks.size))
        self._changed = threading.Condition()
        self._here: set[int] = set()
        self._ready: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._wrote: dict[tuple[int, int], WeightFile] = {}
        """By step and rank."""
        self._step = 0
        self._strangers: list[str] = []
        threading.Thread(target=self._listen, daemon=True, name="ranks").start()

    def meet(self, timeout_s: float = MEET_S) -> None:
        """Waits for every rank to start. What comes next is a collective, which names nobody."""
        self._check_missing(self._wait(lambda: self._others - self._here, timeout_s), timeout_s)

    def gather(self, step: int = 0, timeout_s: float = GATHER_S) -> None:
        """Waits for every rank to say that it is ready, at the same step."""
        self._step = step
        missing = self._wait(lambda: self._others - self._ready.keys(), timeout_s)
        self._check_missing(missing, timeout_s)
        if apart := {r: at for r, at in self._ready.items() if at != step}:
            raise ProcessFailed(
                f"rank 0 starts from step {step}, others from {apart}",
                "give all ranks the same run directory",
            )

    def _check_missing(self, missing: set[int], timeout_s: float) -> None:
        if missing:
            strangers = f"; refused: {', '.join(self._strangers)}" if self._strangers else ""
            raise ProcessFailed(
                f"ranks {sorted(missing)} of {self._ranks.size} are missing after {timeout_s:.0f} s"
                f"{strangers}",
                "look at their logs (trainer-N.log), and at [trainer] ranks, address and secret: "
                "who does not know the secret is not heard",
            )

    def send_shares(self, shares: list[RankAssignment]) -> None:
        """To ranks 1 and up, in order; returns when all have theirs."""
        # Before the first is sent: its answer may come before the last is.
        step = self._step = shares[0].step if shares else self._step
        for rank, share in enumerate(shares, start=1):
            self._send(rank, share)
        late = self._wait(
            lambda: {r for r in self._others if self._taken.get(r, -1) < step}, DELIVER_S
        )
        if late:
            raise ProcessFailed(
                f"ranks {sorted(late)} have not taken their share of step {step} within "
                f"{DELIVER_S:.0f} s",
                "look at their logs (trainer-N.log), and at the network between the machines",
            )

    def wait_for_files(self, step: int) -> list[WeightFile]:
        """What ranks 1 and up wrote of a checkpoint, in order; returns when all have."""

        def missing() -> set[int]:
            # Of exactly this step: a rank may have gone on and written the next.
            return {rank for rank in self._others if (step, rank) not in self._wrote}

        if late := self._wait(missing, WRITE_S):
            raise ProcessFailed(
                f"ranks {sorted(late)} have not written their part of the checkpoint of step "
                f"{step} within {WRITE_S:.0f} s",
                "look at their logs (trainer-N.log), and at the disk of the run",
            )
        return [self._wrote.pop((step, rank)) for rank in sorted(self._others)]

    def announce_end(self) -> None:
        for rank in self._others:
            self._send(rank, NoMoreWork(self._step))

    def fail(self, problem: str) -> None:
        self._tell(RankFailed(0, problem))

    def close(self) -> None:
        self._hub.close()

    def _wait(self, missing: Callable[[], set[int]], timeout_s: float) -> set[int]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (left := missing()) and (rest := deadline - time.monotonic()) > 0:
                self._changed.wait(rest)
            return left

    def _listen(self) -> None:
        try:
            while True:
                found = self._hub.receive()
                assert found is not None
                peer, data = found
                message = wire.decode(data)
                with self._changed:
                    self._note(peer, message)
                    self._changed.notify_all()
        except Exception as error:  # the other ranks are told, and this one ends
            exit_on_error(self, error)

    def _note(self, peer: str, message: RankMessage) -> None:
        if isinstance(message, (RankStarted, RankReady)):
            if peer == peer_name(message.rank) and message.rank in self._others:
                self._here.add(message.rank)
                if isinstance(message, RankReady):
                    self._ready[message.rank] = message.step
            else:
                self._strangers.append(f"{peer} (says that it is rank {message.rank})")
        elif peer not in map(peer_name, self._here):
            self._strangers.append(f"{peer} (said no hello)")
        elif isinstance(message, AssignmentReceived):
            if message.step != self._step:
                problem = f"rank {message.rank} took step {message.step}, not {self._step}"
                self._tell(RankFailed(0, problem))
                self._end(0, RankFailed(0, problem))
            self._taken[message.rank] = message.step
        elif isinstance(message, ShardWritten):
            self._wrote[message.step, message.rank] = message.file
        elif isinstance(message, RankFailed):
            self._tell(message)
            self._end(0, message)

    def _tell(self, failed: RankFailed) -> None:
        for rank in self._here - {failed.rank}:
            self._send(rank, failed)
        self.close()  # which sends it, before the process ends

    def _send(self, rank: int, message: RankMessage) -> None:
        self._hub.send(peer_name(rank), wire.encode(message))


class FollowerChannel:
    """Another rank's end of the channel."""

    def __init__(
        self, ranks: RankInfo, end: Callable[[int, RankFailed], None] = exit_for_failure
    ) -> None:
        self._ranks, self._end = ranks, end
        self._spoke = Spoke(ranks.channel, peer_name(ranks.rank), ranks.secret)
        self._step = 0
        self._shares: queue.SimpleQueue[tuple[RankAssignment, list[np.ndarray | None]] | None]
        self._shares = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="ranks").start()
        self._send(RankStarted(ranks.rank))

    def report_ready(self, step: int = 0) -> None:
        """Ready for the share of the step after `step`."""
        self._step = step
        self._send(RankReady(self._ranks.rank, step))

    def shares(self) -> Iterator[tuple[RankAssignment, list[np.ndarray | None]]]:
        """Each with the patches that were laid for it, until rank 0 says that it is over.

        A step may take hours: there is no deadline.
        """
        while (arrived := self._shares.get()) is not None:
            yield arrived

    def report_file(self, step: int, file: WeightFile) -> None:
        self._send(ShardWritten(self._ranks.rank, step, file))

    def fail(self, problem: str) -> None:
        self._send(RankFailed(self._ranks.rank, problem))
        self.close()  # which sends it, before the process ends

    def close(self) -> None:
        self._spoke.close()

    def _listen(self) -> None:
        try:
            while True:
                data = self._spoke.receive()
                assert data is not None
                self._take(wire.decode(data))
        except Exception as error:  # the other ranks are told, and this one ends
            exit_on_error(self, error)

    def _take(self, message: RankMessage) -> None:
        if isinstance(message, (RankAssignment, NoMoreWork)):
            self._check_step(message)
        if isinstance(message, RankAssignment):
            self._step = message.step
            # Opened before it is taken: after that, rank 0 lets go of the memory.
            self._shares.put((message, open_shared_patches(message.laid)))
            self._send(AssignmentReceived(self._ranks.rank, message.step))
        elif isinstance(message, NoMoreWork):
            self._shares.put(None)
        elif isinstance(message, RankFailed):
            self._end(self._ranks.rank, message)
        else:
            raise WireError(
                f"rank {self._ranks.rank} was sent a {type(message).__name__}",
                "this is a bug; report it",
            )

    def _check_step(self, message: RankAssignment | NoMoreWork) -> None:
        """Nothing between rank 0 and this one was lost, or came twice."""
        is_next = isinstance(message, RankAssignment) and not message.held_out
        expected = self._step + is_next
        if message.step != expected:
            kind = type(message).__name__
            problem = f"rank {self._ranks.rank} was sent {kind} {message.step}, not {expected}"
            self.fail(problem)
            self._end(self._ranks.rank, RankFailed(self._ranks.rank, problem))

    def _send(self, message: RankMessage) -> None:
        self._spoke.send(wire.encode(message))


def peer_name(rank: int) -> str:
    return f"rank-{rank}"
