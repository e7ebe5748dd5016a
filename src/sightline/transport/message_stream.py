"""Messages both ways between two processes that arrive once and in order, whatever becomes of the
connections that carry them.

    sender --DATA n--> receiver --ACK: has all below n + 1--> sender: forgets them
    receiver sees a number too high --ACK: gap--> sender: sends again all that it keeps

A connection keeps its order, so that a number too high is proof of a loss; who has nothing to say
names its next number now and then (PING). No clock says that something is to be sent again.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

from sightline.errors import PeerLost

MAX_SILENCE_S = 600.0
"""How long nothing may be heard of a process; each says something every second."""
MAX_UNACKED_BYTES = 1 << 30
"""Bytes that may wait to be acknowledged by one process."""
HEAD = struct.Struct(">B16sQQII")
"""Kind, session, number, how many the sender of this has received; which sending this belongs to,
and in which one the sender of this saw a gap."""
DATA, PING, ACK, BYE = range(4)
Head = tuple[int, bytes, int, int, int, int]


class MessageStream:
    """One end of the messages both ways between two processes, on whatever connections."""

    def __init__(self, session: bytes, peer: str, write: Callable[[bytes, bytes], None]) -> None:
        self.session, self.peer, self._write = session, peer, write
        self._unacked: deque[bytes] = deque()
        self._num_bytes = self._num_received = 0
        self.num_acked = 0
        """How many the other has acknowledged: the number of the first message that is kept."""
        self._sending, self._gap = 1, 0
        self._silence_s, self._fault = 0.0, ""
        self.owes_ack = False

    @property
    def is_settled(self) -> bool:
        return not self._unacked

    def send(self, data: bytes) -> None:
        self._unacked.append(data)
        self._num_bytes += len(data)
        self._write_head(DATA, self._next - 1, data)

    def signal(self, kind: int) -> None:
        self._write_head(kind, self._next)

    def take(self, head: Head, data: bytes) -> bytes | None:
        """The message, where it is the next one."""
        kind, _, number, num_acked, sending, gap = head
        self._silence_s = 0.0
        if num_acked > self._next:
            self._fault = f"acknowledged {num_acked} messages of {self._next}"
        while self._unacked and self.num_acked < num_acked:
            self._num_bytes -= len(self._unacked.popleft())
            self.num_acked += 1
        if gap == self._sending:
            self._sending += 1
            for i, kept in enumerate(self._unacked):
                self._write_head(DATA, self.num_acked + i, kept)
        self.owes_ack |= kind in (DATA, PING)
        if kind == DATA and number == self._num_received:
            self._num_received += 1
            return data
        if number > self._num_received and sending > self._gap:
            self._gap, self.owes_ack = sending, True
        return None

    def find_problem(self, passed_s: float) -> PeerLost | None:
        """What is wrong `passed_s` seconds after the last look."""
        self._silence_s += passed_s
        is_heard = self._silence_s <= MAX_SILENCE_S and self._num_bytes <= MAX_UNACKED_BYTES
        if is_heard and not self._fault:
            return None
        unacked = f"has not taken {len(self._unacked)} messages ({self._num_bytes:,} bytes)"
        return PeerLost(
            f"{self.peer} {self._fault or unacked}, and was silent for {self._silence_s:.0f} s",
            "look at its log in logs/, and at the network between the machines",
            self.peer,
        )

    @property
    def _next(self) -> int:
        return self.num_acked + len(self._unacked)

    def _write_head(self, kind: int, number: int, data: bytes = b"") -> None:
        self.owes_ack = False
        head = (kind, self.session, number, self._num_received, self._sending, self._gap)
        self._write(HEAD.pack(*head), data)
