"""The ranks of a trainer: what they tell one another, and how they end together.

    rank r --RankStarted--> rank 0             before any collective: who is missing is named
    rank r --RankReady k--> rank 0             its model is loaded, from the checkpoint of step k
    rank 0 --RankAssignment k--> rank r        a thread of r takes it, whatever r computes meanwhile
      waits for: AssignmentReceived of every rank, DELIVER_S at most   unblocked by: those threads
    rank r --RankFailed--> rank 0 --RankFailed--> every rank    each ends at once, and says why

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
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from sightline.errors import ProcessFailed, WireError, clean_text
from sightline.transport.zmq_channel import Hub, Spoke, derive_spoke_key
from sightline.wire import rank_messages as wire
from sightline.wire.codec import get_release
from sightline.wire.rank_messages import RankAssignment, RankFailed, RankMessage, rank_process_name
from sightline.wire.weights import WeightFile

STORE_KEY = "sightline/run"
RENDEZVOUS_TIMEOUT_S = 600.0
"""How long rank 0 may take to check the run file and to make the run directory."""
START_S = 600.0
"""How long the ranks of a run may take to start."""
LOAD_S = 600.0
"""How long they may take longer than rank 0 to load their models."""
DELIVER_S = 60.0
"""How long a rank may take to acknowledge its share of a batch."""
WRITE_S = 3600.0
"""How long a rank may take to write its part of a checkpoint."""


@dataclass(frozen=True)
class RankInfo:
    """Which rank of how many this process is, and where it finds the others."""

    rank: int = 0
    size: int = 1
    master_address: str = ""
    """host:port at which torch.distributed brings the ranks together."""
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
_LOGS = "look at their logs (trainer-N.log)"


def exit_for_failure(own: int, failed: RankFailed) -> None:
    """Ends this process because of another's failure."""
    words = f"rank {own} ends because rank {failed.rank} failed: {failed.problem}"
    print(words, file=sys.stderr, flush=True)
    os._exit(wire.EXIT_OTHER_RANK_FAILED)


def listen(channel: LeadChannel | FollowerChannel) -> None:
    """Takes every message. Where that fails, which nobody waits for, this process ends."""
    try:
        while True:
            channel.take_next()
    except Exception as error:  # the other ranks are told, and this one ends
        channel.claim_end()
        channel.fail(f"{type(error).__name__}: {error}")
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)


class _ProcessEnd:
    def __init__(self) -> None:
        self._ending = threading.Lock()

    def claim_end(self) -> None:
        """Called by the thread whose error ends this process. Where another's does already, of
        which this one is a consequence, it waits for the end."""
        self._ending.acquire()


class LeadChannel(_ProcessEnd):
    """Rank 0's end of the channel."""

    def __init__(
        self,
        ranks: RankInfo,
        end: Callable[[int, RankFailed], None] = exit_for_failure,
        deliver_s: float = DELIVER_S,
        write_s: float = WRITE_S,
    ) -> None:
        self._ranks, self._end = ranks, end
        super().__init__()
        self._deliver_s, self._write_s = deliver_s, write_s
        self._hub = Hub(ranks.channel, ranks.secret)
        self._others = set(range(1, ranks.size))
        self._changed = threading.Condition()
        self._started: set[int] = set()
        self._ready: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._written: dict[tuple[int, int], list[WeightFile]] = {}
        """The files of checkpoints that other ranks have written, by step and rank."""
        self._step = 0
        self._strangers: list[str] = []
        threading.Thread(target=listen, args=(self,), daemon=True, name="ranks").start()

    def wait_for_start(self, timeout_s: float = START_S) -> None:
        """Waits for every rank to start. What comes next is a collective, which names nobody."""
        self._wait_for_ranks(lambda: self._others - self._started, timeout_s)

    def wait_until_loaded(self, step: int = 0, timeout_s: float = LOAD_S) -> None:
        """Waits for every rank to say that its model is loaded, from the checkpoint of `step`."""
        self._step = step
        self._wait_for_ranks(lambda: self._others - self._ready.keys(), timeout_s)
        if apart := {r: at for r, at in self._ready.items() if at != step}:
            raise ProcessFailed(
                f"rank 0 starts from step {step}, others from {apart}",
                "give all ranks the same run directory",
            )

    def _wait_for_ranks(self, missing: Callable[[], set[int]], timeout_s: float) -> None:
        if late := self._wait(missing, timeout_s):
            strangers = f"; refused: {', '.join(self._strangers)}" if self._strangers else ""
            raise ProcessFailed(
                f"ranks {sorted(late)} of {self._ranks.size} are missing after {timeout_s:.0f} s"
                f"{strangers}",
                f"{_LOGS}, and at [trainer] ranks and address: who does not know the secret of the "
                "run, from its directory or SIGHTLINE_SECRET, is not heard",
            )

    def send_shares(self, shares: list[RankAssignment]) -> None:
        """Sends ranks 1 and up their shares, in order; returns when all have received theirs."""
        # Before the first is sent: its answer may come before the last is.
        step = self._step = shares[0].step if shares else self._step
        for rank, share in enumerate(shares, start=1):
            self._send(rank, share)
        late = self._wait(
            lambda: {r for r in self._others if self._received.get(r, -1) < step}, self._deliver_s
        )
        if late:
            raise ProcessFailed(
                f"ranks {sorted(late)} have not taken their share of step {step} within "
                f"{self._deliver_s:.0f} s",
                f"{_LOGS}, and at the network between the machines",
            )

    def collect_files(self, step: int, files: list[WeightFile]) -> list[WeightFile]:
        """The files of the checkpoint of `step`, by rank; returns when every rank wrote its own."""

        def missing() -> set[int]:
            # Of exactly this step: a rank may have gone on and written the next.
            return {rank for rank in self._others if (step, rank) not in self._written}

        if late := self._wait(missing, self._write_s):
            raise ProcessFailed(
                f"ranks {sorted(late)} have not written their part of the checkpoint of step "
                f"{step} within {self._write_s:.0f} s",
                f"{_LOGS}, and at the disk of the run",
            )
        return sum((self._written.pop((step, rank)) for rank in sorted(self._others)), files)

    def announce_end(self) -> None:
        for rank in self._others:
            self._send(rank, wire.NoMoreWork(self._step))

    def fail(self, problem: str) -> None:
        self._tell(RankFailed(0, clean_text(problem)))

    def close(self) -> None:
        self._hub.close()

    def _wait(self, missing: Callable[[], set[int]], timeout_s: float) -> set[int]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (left := missing()) and (rest := deadline - time.monotonic()) > 0:
                self._changed.wait(rest)
            return left

    def take_next(self) -> None:
        found = self._hub.receive()
        assert found is not None
        peer, data = found
        message = wire.decode_from(peer, data)
        with self._changed:
            self._note(peer, message)
            self._changed.notify_all()

    def _note(self, peer: str, message: RankMessage) -> None:
        if isinstance(message, (wire.RankStarted, wire.RankReady)):
            if peer == rank_process_name(message.rank) and message.rank in self._others:
                self._started.add(message.rank)
                if isinstance(message, wire.RankStarted) and message.release != get_release():
                    theirs = message.release or "an older sightline"
                    problem = f"rank {message.rank} runs {theirs}, rank 0 {get_release()}"
                    self._end_all(RankFailed(0, problem))
                if isinstance(message, wire.RankReady):
                    self._ready[message.rank] = message.step
            else:
                self._strangers.append(f"{peer} (says that it is rank {message.rank})")
        elif peer not in map(rank_process_name, self._started):
            self._strangers.append(f"{peer} (did not say which rank it is)")
        elif isinstance(message, wire.AssignmentReceived):
            if message.step != self._step:
                problem = f"rank {message.rank} took step {message.step}, not {self._step}"
                self._end_all(RankFailed(0, problem))
            else:
                self._received[message.rank] = message.step
        elif isinstance(message, wire.ShardWritten):
            self._written[message.step, message.rank] = message.files
        elif isinstance(message, RankFailed):
            self._end_all(message)

    def _end_all(self, failed: RankFailed) -> None:
        self._tell(failed)
        self._end(0, failed)

    def _tell(self, failed: RankFailed) -> None:
        for rank in self._started - {failed.rank}:
            with suppress(ProcessFailed):  # it is the one that is lost
                self._send(rank, failed)
        self.close()  # which sends it, before the process ends

    def _send(self, rank: int, message: RankMessage) -> None:
        self._hub.send(rank_process_name(rank), wire.encode(message))


class FollowerChannel(_ProcessEnd):
    """Another rank's end of the channel."""

    def __init__(
        self, ranks: RankInfo, end: Callable[[int, RankFailed], None] = exit_for_failure
    ) -> None:
        self._ranks, self._end = ranks, end
        super().__init__()
        name = rank_process_name(ranks.rank)
        self._spoke = Spoke(ranks.channel, name, derive_spoke_key(ranks.secret, name))
        self._step = 0
        self._shares: queue.SimpleQueue[RankAssignment | None] = queue.SimpleQueue()
        threading.Thread(target=listen, args=(self,), daemon=True, name="ranks").start()
        self._send(wire.RankStarted(ranks.rank, get_release()))

    def report_ready(self, step: int = 0) -> None:
        """Tells rank 0 that this rank is ready for its share of the step after `step`."""
        self._step = step
        self._send(wire.RankReady(self._ranks.rank, step))

    def shares(self) -> Iterator[RankAssignment]:
        """This rank's shares in step order, until rank 0 announces the end.

        A step may take hours: there is no deadline.
        """
        while (share := self._shares.get()) is not None:
            yield share

    def collect_files(self, step: int, files: list[WeightFile]) -> None:
        """Tells rank 0, which collects them, of this rank's files of the checkpoint of `step`."""
        self._send(wire.ShardWritten(self._ranks.rank, step, files))

    def fail(self, problem: str) -> None:
        with suppress(ProcessFailed):  # rank 0 is the one that is lost
            self._send(RankFailed(self._ranks.rank, clean_text(problem)))
        self.close()  # which sends it, before the process ends

    def close(self) -> None:
        self._spoke.close()

    def take_next(self) -> None:
        data = self._spoke.receive()
        assert data is not None
        message = wire.decode_from(rank_process_name(0), data)
        if isinstance(message, (RankAssignment, wire.NoMoreWork)):
            if problem := self._find_gap(message):
                self.fail(problem)
                self._end(self._ranks.rank, RankFailed(self._ranks.rank, problem))
            elif isinstance(message, RankAssignment):
                self._step = message.step
                self._shares.put(message)
                self._send(wire.AssignmentReceived(self._ranks.rank, message.step))
            else:
                self._shares.put(None)
        elif isinstance(message, RankFailed):
            self._end(self._ranks.rank, message)
        else:
            raise WireError(
                f"rank {self._ranks.rank} was sent a {type(message).__name__}",
                "this is a bug; report it",
            )

    def _find_gap(self, message: RankAssignment | wire.NoMoreWork) -> str:
        """What is wrong where a message was lost on its way, or came twice; empty if none was."""
        is_next = isinstance(message, RankAssignment) and not message.held_out
        expected = self._step + is_next
        if message.step == expected:
            return ""
        kind = type(message).__name__
        return f"rank {self._ranks.rank} was sent {kind} {message.step}, not {expected}"

    def _send(self, message: RankMessage) -> None:
        self._spoke.send(wire.encode(message))


class RendezvousStore:
    """How ranks that torchrun started learn of one run: from the store that it keeps for them."""

    def __init__(self, host: str, port: int, is_master: bool) -> None:
        # The launcher has no torch.
        from sightline.compute.tcp_store import connect_store, listen_store

        if is_master:
            self._store = listen_store(host, port, RENDEZVOUS_TIMEOUT_S)
        else:
            self._store = connect_store(f"{host}:{port}", RENDEZVOUS_TIMEOUT_S)

    def post(self, meeting: wire.Rendezvous) -> None:
        self._store.set(STORE_KEY, msgspec.json.encode(meeting).decode())

    def read(self) -> wire.Rendezvous:
        """Waits for rank 0."""
        return msgspec.json.decode(self._store.get(STORE_KEY), type=wire.Rendezvous)


class NoChannel:
    """The channel of a single rank, which has nobody to tell."""

    def claim_end(self) -> None:
        pass

    def collect_files(self, step: int, files: list[WeightFile]) -> list[WeightFile]:
        return files

    def fail(self, problem: str) -> None:
        pass

    def close(self) -> None:
        pass


NO_CHANNEL = NoChannel()
RankChannel = LeadChannel | FollowerChannel | NoChannel


def open_channel(ranks: RankInfo) -> RankChannel:
    if ranks.size == 1:
        return NO_CHANNEL
    return LeadChannel(ranks) if ranks.is_lead else FollowerChannel(ranks)
