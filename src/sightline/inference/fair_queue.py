"""Who is admitted next: requests wait by client and by call, and who holds least goes first.

A call is one HTTP request, a client the machine that it comes from. Of the clients that wait, the
one with the fewest choices in flight is served, of its calls likewise, and of equals the first to
come. A call of 64 choices, or a client of 1,000 calls, so takes what others leave, and a small
request waits for the next sequence that ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from sightline.inference.engine import EngineRequest

_Level = dict[int, deque[EngineRequest]]
"""Calls that have equally many choices in flight, each with its choices that wait."""


class FairQueue:
    """Requests that wait for a place among those in flight. For one thread."""

    def __init__(self) -> None:
        self._levels: dict[str, dict[int, _Level]] = {}
        """Of each client that waits, its calls by their number of choices in flight."""
        self._num_held: Counter[tuple[str, int | None]] = Counter()
        """Choices in flight of each client and of each of its calls."""
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
        """The request that is due; it stays until it is taken."""
        if not self._levels:
            return None
        levels = self._levels[min(self._levels, key=lambda client: self._num_held[client, None])]
        return next(iter(levels[min(levels)].values()))[0]

    def remove(self, request: EngineRequest) -> bool:
        """Takes a request out; False when it does not wait."""
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
        """The request is in flight from now on, until it is released."""
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
        """Puts a call behind those with as many in flight as it has; forgets what is empty."""
        levels = self._levels.get(client, {})
        choices = levels.get(before, {}).pop(call, None)
        if choices:
            levels.setdefault(self._num_held[client, call], {})[call] = choices
        if before in levels and not levels[before]:
            del levels[before]
        if not levels:
            self._levels.pop(client, None)
