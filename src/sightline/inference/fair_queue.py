"""A fair queue: the client, and then the call, with the fewest choices in flight goes first.

A call is one HTTP request, and a client is the machine that sent it. Ties go to the first that
arrived. A call with 64 choices, or a client with 1,000 calls, therefore cannot starve others: a
small request waits only until the next sequence ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from sightline.inference.engine import EngineRequest

_Level = dict[int, deque[EngineRequest]]
"""The waiting choices of each call, for calls with the same number of choices in flight."""


class FairQueue:
    """Requests that wait to be admitted. Not thread-safe."""

    def __init__(self) -> None:
        self._levels: dict[str, dict[int, _Level]] = {}
        """Each waiting client's calls, by their number of choices in flight."""
        self._num_held: Counter[tuple[str, int | None]] = Counter()
        """Choices in flight, by client and by call."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[EngineRequest]:
        for levels in self._levels.values():
            for level in levels.values():
                for choices in level.values():
                    yield from choices

    def add(self, request: EngineRequest) -> None:
        client, call = request.client, id(request.owner)
        level = self._levels.setdefault(client, {}).setdefault(self._num_held[client, call], {})
        level.setdefault(call, deque()).append(request)
        self._num_waiting += 1

    def find_next(self) -> EngineRequest | None:
        """Return the next request without removing it."""
        if not self._levels:
            return None
        levels = self._levels[min(self._levels, key=lambda client: self._num_held[client, None])]
        return next(iter(levels[min(levels)].values()))[0]

    def remove(self, request: EngineRequest) -> bool:
        """Remove a request; return False if it does not wait."""
        client, call = request.client, id(request.owner)
        choices = self._levels.get(client, {}).get(self._num_held[client, call], {}).get(call, ())
        if request not in choices:
            return False
        assert isinstance(choices, deque)
        choices.remove(request)
        self._num_waiting -= 1
        self._move(client, call, self._num_held[client, call])
        return True

    def take(self, request: EngineRequest) -> None:
        """Move a request from waiting to in flight, until it is released."""
        if self.remove(request):
            self._hold(request, 1)

    def release(self, request: EngineRequest) -> None:
        self._hold(request, -1)

    def _hold(self, request: EngineRequest, change: int) -> None:
        client, call = request.client, id(request.owner)
        before = self._num_held[client, call]
        for key in ((client, None), (client, call)):
            self._num_held[key] += change
            if not self._num_held[key]:
                del self._num_held[key]
        self._move(client, call, before)

    def _move(self, client: str, call: int, before: int) -> None:
        """Move a call behind those with as many choices in flight; drop what is empty."""
        levels = self._levels.get(client, {})
        choices = levels.get(before, {}).pop(call, None)
        if choices:
            levels.setdefault(self._num_held[client, call], {})[call] = choices
        if before in levels and not levels[before]:
            del levels[before]
        if not levels:
            self._levels.pop(client, None)
