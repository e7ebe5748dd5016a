"""Reliable messages between two processes, once and in order, even if connections break.

    sender --DATA n--> receiver --ACK: has all below n + 1--> sender: forgets them
    receiver sees a number too high --ACK: gap--> sender: resends all that it keeps

A connection preserves order, so a number that is too high proves a loss. An idle sender announces
its next number periodically (PING). Resends do not depend on timeouts.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

from sightline.errors import PeerLost

MAX_SILENCE_S = 600.0
"""Maximum silence of a process. Each one sends something every second."""
MAX_UNACKED_BYTES = 1 << 30
"""Maximum number of unacknowledged bytes to one process."""
HEAD = struct.Struct(">B16sQQII")
"""Kind, session, number, number of messages received; the send attempt of this message, and the
attempt in which its sender saw a gap."""
DATA, PING, ACK, BYE = range(4)
Head = tuple[int, bytes, int, int, int, int]


class MessageStream:
    """One end of a message stream between two processes, over any number of connections."""

    def __init__(self, session: bytes, peer: str, write: Callable[[bytes, bytes], None]) -> None:
        self.session, self.peer, self._write = session, peer, write
        self._unacked: deque[bytes] = deque()
        self._num_bytes = self._num_received = 0
        self.num_acked = 0
        """Number of acknowledged messages, which is the number of the first one kept."""
        self._sending, self._gap = 1, 0
        self._silence_s = 0.0
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
        """Return the message if it is the next one."""
        kind, _, number, num_acked, sending, gap = head
        self._silence_s = 0.0
        while self._unacked and self.num_acked < num_acked:
            self._num_bytes -= len(self._unacked.popleft())
            self.num_acked += 1
        if gap == self._sending:
            self._sending += 1
            for i, message in enumerate(self._unacked):
                self._write_head(DATA, self.num_acked + i, message)
        self.owes_ack |= kind in (DATA, PING)
        if kind == DATA and number == self._num_received:
            self._num_received += 1
            return data
        if number > self._num_received and sending > self._gap:
            self._gap, self.owes_ack = sending, True
        return None

    def find_problem(self, passed_s: float) -> PeerLost | None:
        """Return the stream's problem, if any, `passed_s` seconds after the last check."""
        self._silence_s += passed_s
        if self._silence_s <= MAX_SILENCE_S and self._num_bytes <= MAX_UNACKED_BYTES:
            return None
        return PeerLost(
            f"{self.peer} has not acknowledged {len(self._unacked)} messages "
            f"({self._num_bytes:,} bytes), and was silent for {self._silence_s:.0f} s",
            "check its log in logs/ and the network between the machines",
            self.peer,
        )

    @property
    def _next(self) -> int:
        return self.num_acked + len(self._unacked)

    def _write_head(self, kind: int, number: int, data: bytes = b"") -> None:
        self.owes_ack = False
        head = (kind, self.session, number, self._num_received, self._sending, self._gap)
        self._write(HEAD.pack(*head), data)
