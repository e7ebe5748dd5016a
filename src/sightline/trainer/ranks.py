"""The control channel between the trainer's ranks, and how they fail together.

    rank r --RankStarted--> rank 0             before any collective: a missing rank is named
    rank r --RankReady k--> rank 0             its model is loaded, from the checkpoint of step k
    rank 0 --RankAssignment k--> rank r        a thread of r receives it while r computes
      waits for: AssignmentReceived of every rank, for up to DELIVER_S   unblocked by: those threads
    rank r --RankFailed--> rank 0 --RankFailed--> every rank    each ends at once and says why

A rank that is stuck in a collective because another rank failed cannot be interrupted there. Its
listening thread ends the process.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from sightline.errors import ProcessFailed, WireError, clean_text
from sightline.transport.zmq_channel import Hub, Spoke, derive_spoke_key
from sightline.wire import rank_messages as wire
from sightline.wire.codec import get_release
from sightline.wire.rank_messages import RankAssignment, RankFailed, RankMessage, rank_process_name
from sightline.wire.weights import WeightFile

START_S = 600.0
"""How long the other ranks may take to start."""
LOAD_S = 600.0
"""How much longer than rank 0 the other ranks may take to load their models."""
DELIVER_S = 60.0
"""How long a rank may take to acknowledge its share of a batch."""
WRITE_S = 3600.0
"""How long a rank may take to write its part of a checkpoint."""


@dataclass(frozen=True)
class RankInfo:
    """This process's rank, and the addresses of the others."""

    rank: int = 0
    size: int = 1
    master_address: str = ""
    """host:port of torch.distributed's rendezvous."""
    channel: str = ""
    """Address of rank 0's channel."""
    secret: str = field(default="", repr=False)
    """The secret of the ranks' channel."""
    hub_key: str = field(default="", repr=False)
    """The key of the trainer's channel to the orchestrator."""

    @property
    def is_lead(self) -> bool:
        return self.rank == 0


SINGLE_RANK = RankInfo()
_CHECK_RANKS = (
    "check [trainer] ranks and address. Ranks whose secret differs (from the run directory "
    "or SIGHTLINE_SECRET) are rejected"
)
EndProcess = Callable[[int, RankFailed], None]


def exit_for_failure(rank: int, failed: RankFailed) -> None:
    """End this process because another rank failed."""
    message = f"rank {rank} ends because rank {failed.rank} failed: {failed.problem}"
    print(message, file=sys.stderr, flush=True)
    os._exit(wire.EXIT_OTHER_RANK_FAILED)


class RankChannel:
    """The base channel, and that of a single rank, which sends nothing."""

    def __init__(self) -> None:
        self._ending = threading.Lock()

    def claim_end(self) -> None:
        """Let the calling thread's error end this process.

        If another thread's error is already ending it, this error is a consequence: wait.
        """
        self._ending.acquire()

    def collect_files(self, step: int, files: list[WeightFile]) -> list[WeightFile] | None:
        """Hand over this rank's files of the checkpoint of `step`. Rank 0 returns every rank's."""
        return files

    def fail(self, problem: str) -> None:
        """Tell the other ranks that this one failed."""

    def close(self) -> None:
        pass

    def take_next(self) -> None:
        """Receive and handle one message."""
        raise NotImplementedError

    def _start_listening(self) -> None:
        threading.Thread(target=self._listen, daemon=True, name="ranks").start()

    def _listen(self) -> None:
        """Receive messages for as long as the process lives. An error here ends the process."""
        try:
            while True:
                self.take_next()
        except Exception as error:  # tell the other ranks, and end this one
            self.claim_end()
            self.fail(f"{type(error).__name__}: {error}")
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)


NO_CHANNEL = RankChannel()


class LeadChannel(RankChannel):
    """Rank 0's end of the channel."""

    def __init__(
        self,
        ranks: RankInfo,
        end: EndProcess = exit_for_failure,
        deliver_s: float = DELIVER_S,
        write_s: float = WRITE_S,
    ) -> None:
        super().__init__()
        self._ranks, self._end = ranks, end
        self._deliver_s, self._write_s = deliver_s, write_s
        self._hub = Hub(ranks.channel, ranks.secret)
        self._rank_of = {rank_process_name(rank): rank for rank in range(1, ranks.size)}
        """The rank of each accepted process, by the name that its key authenticates."""
        self._others = set(self._rank_of.values())
        self._changed = threading.Condition()
        self._started: set[int] = set()
        self._ready: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._written: dict[tuple[int, int], list[WeightFile]] = {}
        """Checkpoint files that other ranks have written, by step and rank."""
        self._step = 0
        self._strangers: list[str] = []
        self._start_listening()

    def wait_for_start(self, timeout_s: float = START_S) -> None:
        """Wait for every rank to start. The error names missing ranks, unlike a collective's."""
        self._wait(lambda: self._others - self._started, timeout_s, "are missing", _CHECK_RANKS)

    def wait_until_loaded(self, step: int = 0, timeout_s: float = LOAD_S) -> None:
        """Wait for every rank to have loaded its model from the checkpoint of `step`."""
        self._step = step
        loading, ready = self._others, self._ready
        self._wait(lambda: loading - ready.keys(), timeout_s, "are missing", _CHECK_RANKS)
        if others := {rank: at for rank, at in self._ready.items() if at != step}:
            raise ProcessFailed(
                f"rank 0 starts from step {step}, others from {others}",
                "give all ranks the same run directory",
            )

    def send_shares(self, shares: list[RankAssignment]) -> None:
        """Send ranks 1 and up their shares, in order. Return when all have received theirs."""
        # Set before sending: the first answer may arrive before the last share is sent.
        step = self._step = shares[0].step if shares else self._step
        for rank, share in enumerate(shares, start=1):
            self._send(rank, share)
        self._wait(
            lambda: {rank for rank in self._others if self._received.get(rank, -1) < step},
            self._deliver_s,
            f"have not received their share of step {step}",
            "check the network between the machines",
        )

    def collect_files(self, step: int, files: list[WeightFile]) -> list[WeightFile]:
        """Wait for every rank to write its part, and return all files in rank order."""
        self._wait(
            # Only this step's files: a rank may already have written the next step's.
            lambda: {rank for rank in self._others if (step, rank) not in self._written},
            self._write_s,
            f"have not written their part of the checkpoint of step {step}",
            "check the disk of the run",
        )
        return sum((self._written.pop((step, rank)) for rank in sorted(self._others)), files)

    def announce_end(self) -> None:
        for rank in self._others:
            self._send(rank, wire.NoMoreWork(self._step))

    def fail(self, problem: str) -> None:
        self._tell(RankFailed(0, clean_text(problem)))

    def close(self) -> None:
        self._hub.close()

    def _wait(
        self, list_missing: Callable[[], set[int]], timeout_s: float, problem: str, fix: str
    ) -> None:
        """Wait until no rank is missing. After `timeout_s`, raise with their numbers."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (missing := list_missing()) and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
        if missing:
            strangers = f"; rejected: {', '.join(self._strangers)}" if self._strangers else ""
            raise ProcessFailed(
                f"ranks {sorted(missing)} of {self._ranks.size} {problem} after {timeout_s:.0f} s"
                f"{strangers}",
                f"read the logs of these ranks (trainer-N.log), and {fix}",
            )

    def take_next(self) -> None:
        received = self._hub.receive()
        assert received is not None
        peer, data = received
        message = wire.decode_from(peer, data)
        with self._changed:
            rank = self._rank_of.get(peer)
            if rank is None:
                self._strangers.append(peer)
            else:
                self._handle(rank, message)
            self._changed.notify_all()

    def _handle(self, rank: int, message: RankMessage) -> None:
        match message:
            case wire.RankStarted(release):
                self._started.add(rank)
                if release != get_release():
                    problem = f"rank {rank} runs {release or 'an older sightline'}"
                    self._end_all(RankFailed(0, f"{problem}, rank 0 {get_release()}"))
            case wire.RankReady(step):
                self._ready[rank] = step
            case wire.AssignmentReceived(step):
                self._received[rank] = step
            case wire.ShardWritten(step, files):
                self._written[step, rank] = files
            case RankFailed(problem=problem):
                self._end_all(RankFailed(rank, problem))

    def _end_all(self, failed: RankFailed) -> None:
        self._tell(failed)
        self._end(0, failed)

    def _tell(self, failed: RankFailed) -> None:
        for rank in self._started - {failed.rank}:
            with suppress(ProcessFailed):  # this rank may be gone too
                self._send(rank, failed)
        self.close()  # flushes sent messages before the process ends

    def _send(self, rank: int, message: RankMessage) -> None:
        self._hub.send(rank_process_name(rank), wire.encode(message))


class FollowerChannel(RankChannel):
    """Any other rank's end of the channel."""

    def __init__(self, ranks: RankInfo, end: EndProcess = exit_for_failure) -> None:
        super().__init__()
        self._rank, self._end = ranks.rank, end
        name = rank_process_name(ranks.rank)
        self._spoke = Spoke(ranks.channel, name, derive_spoke_key(ranks.secret, name))
        self._step = 0
        self._shares: queue.SimpleQueue[RankAssignment | None] = queue.SimpleQueue()
        self._start_listening()
        self._send(wire.RankStarted(get_release()))

    def report_ready(self, step: int = 0) -> None:
        """Tell rank 0 that this rank is ready for its share of the step after `step`."""
        self._step = step
        self._send(wire.RankReady(step))

    def shares(self) -> Iterator[RankAssignment]:
        """Yield this rank's shares in step order, until rank 0 announces the end.

        There is no deadline, because a step may take hours.
        """
        while (share := self._shares.get()) is not None:
            yield share

    def collect_files(self, step: int, files: list[WeightFile]) -> None:
        """Tell rank 0 that this rank has written its files of the checkpoint of `step`."""
        self._send(wire.ShardWritten(step, files))

    def fail(self, problem: str) -> None:
        with suppress(ProcessFailed):  # rank 0 may be gone
            self._send(RankFailed(self._rank, clean_text(problem)))
        self.close()  # flushes sent messages before the process ends

    def close(self) -> None:
        self._spoke.close()

    def take_next(self) -> None:
        data = self._spoke.receive()
        assert data is not None
        message = wire.decode_from(rank_process_name(0), data)
        if isinstance(message, RankFailed):
            self._end(self._rank, message)
        elif not isinstance(message, (RankAssignment, wire.NoMoreWork)):
            raise WireError(
                f"rank {self._rank} received a {type(message).__name__}", "this is a bug. Report it"
            )
        elif problem := self._find_gap(message):
            self.fail(problem)
            self._end(self._rank, RankFailed(self._rank, problem))
        elif isinstance(message, RankAssignment):
            self._step = message.step
            self._shares.put(message)
            self._send(wire.AssignmentReceived(message.step))
        else:
            self._shares.put(None)

    def _find_gap(self, message: RankAssignment | wire.NoMoreWork) -> str:
        """Describe a message that was lost or came twice. Empty if there is none."""
        expected = self._step + (isinstance(message, RankAssignment) and not message.held_out)
        received = f"rank {self._rank} received {type(message).__name__} {message.step}"
        return "" if message.step == expected else f"{received}, not {expected}"

    def _send(self, message: RankMessage) -> None:
        self._spoke.send(wire.encode(message))


def open_channel(ranks: RankInfo) -> RankChannel:
    if ranks.size == 1:
        return NO_CHANNEL
    return LeadChannel(ranks) if ranks.is_lead else FollowerChannel(ranks)
