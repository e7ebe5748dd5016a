"""A fair queue: the client, and then the call, with the fewest choices in flight goes first.

A call is one HTTP request, and a client is the machine that sent it. Ties go to the first that
arrived. A call with 64 choices, or a client with 1,000 calls, therefore cannot starve others: a
small request waits only until the next sequence ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from sightline.inference.engine import EngineRequest


class FairQueue:
    """Requests that wait to be admitted. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, deque[EngineRequest]]] = {}
        """The waiting choices of each client's calls. The call that was served last is last."""
        self._num_waiting = 0
        self._num_held: Counter[tuple[str, int | None]] = Counter()
        """Choices in flight, by client and by call."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[EngineRequest]:
        for calls in self._waiting.values():
            for choices in calls.values():
                yield from choices

    def add(self, request: EngineRequest) -> None:
        calls = self._waiting.setdefault(request.client, {})
        calls.setdefault(id(request.owner), deque()).append(request)
        self._num_waiting += 1

    def find_next(self) -> EngineRequest | None:
        """Return the next request without removing it."""
        if not self._waiting:
            return None
        client = min(self._waiting, key=lambda client: self._num_held[client, None])
        calls = self._waiting[client]
        return calls[min(calls, key=lambda call: self._num_held[client, call])][0]

    def remove(self, request: EngineRequest) -> bool:
        """Remove a request. Return False if it is not waiting."""
        calls = self._waiting.get(request.client, {})
        choices = calls.get(id(request.owner), deque())
        if request not in choices:
            return False
        choices.remove(request)
        self._num_waiting -= 1
        if not choices:
            del calls[id(request.owner)]
        if not calls:
            del self._waiting[request.client]
        return True

    def take(self, request: EngineRequest) -> None:
        """Move a request from waiting to in flight, until it is released."""
        if self.remove(request):
            self._hold(request, 1)

    def release(self, request: EngineRequest) -> None:
        self._hold(request, -1)

    def _hold(self, request: EngineRequest, change: int) -> None:
        calls, call = self._waiting.get(request.client, {}), id(request.owner)
        if call in calls:  # moves after calls with equally many choices in flight
            calls[call] = calls.pop(call)
        for key in ((request.client, None), (request.client, call)):
            self._num_held[key] += change
            if not self._num_held[key]:
                del self._num_held[key]
