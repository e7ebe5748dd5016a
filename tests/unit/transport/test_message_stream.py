"""Messages over connections that break: each arrives once, in order."""

from __future__ import annotations

import random
from functools import partial

import pytest

from sightline.transport.message_stream import ACK, HEAD, PING, MessageStream

SESSION = b"s" * 16


class Line:
    """Two streams, and the messages in transit between them."""

    def __init__(self) -> None:
        self.under_way: dict[str, list[tuple[bytes, bytes]]] = {"a": [], "b": []}
        self.ends = {
            name: MessageStream(SESSION, name, partial(self._write, to))
            for name, to in (("a", "b"), ("b", "a"))
        }
        self.received: dict[str, list[bytes]] = {"a": [], "b": []}

    def _write(self, to: str, head: bytes, data: bytes) -> None:
        self.under_way[to].append((head, data))

    def deliver(self, to: str) -> None:
        if self.under_way[to]:
            head, data = self.under_way[to].pop(0)
            delivered = self.ends[to].take(HEAD.unpack(head), data)
            if delivered is not None:
                self.received[to].append(delivered)
            if self.ends[to].owes_ack:
                self.ends[to].signal(ACK)

    def settle(self) -> None:
        for _ in range(10):
            for name in "ab":
                self.ends[name].signal(PING)
            while any(self.under_way.values()):
                for name in "ab":
                    self.deliver(name)


def test_repeated_message_is_delivered_once() -> None:
    line = Line()
    line.ends["a"].send(b"one")
    line.under_way["b"] *= 2
    line.settle()
    assert line.received["b"] == [b"one"] and line.ends["a"].is_settled


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_once_and_in_order_despite_failures(seed: int) -> None:
    rng, line = random.Random(seed), Line()
    sent: dict[str, list[bytes]] = {"a": [], "b": []}
    for number in range(200):
        name, other = rng.choice(("ab", "ba"))
        match rng.randrange(8):
            case 0:
                line.under_way[name].clear()  # a connection breaks, with all that is on it
            case 1:
                line.ends[name].signal(PING)
            case 2 | 3:
                sent[other].append(data := b"%d" % number)
                line.ends[name].send(data)
            case _:
                line.deliver(name)
    line.settle()
    assert line.received == sent
