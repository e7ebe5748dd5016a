"""A small bounded map that forgets what was used longest ago; safe among threads."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    def __init__(self, max_entries: int) -> None:
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._max_entries = max_entries
        self._lock = Lock()

    def find(self, key: Key) -> Value | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def set(self, key: Key, value: Value) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)
