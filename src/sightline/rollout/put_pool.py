"""Images go into the store in threads, while the event loop goes on.

To check, hash, write and sync a screenshot takes milliseconds, to encode a PIL image a hundred or
more. `put` gives a ref at once, which is filled in when the store has the image; whoever sends
it to the model waits for that first.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, cast

from sightline.media import MediaRef, MediaStore
from sightline.message import replace_images

PUT_THREADS = 4
"""The store's work is mostly outside the interpreter's lock; more threads would only contend."""


class PendingRef:
    """A ref whose image is on its way into the store. Looking at its fields waits for it."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[MediaRef]) -> None:
        self._future = future

    @property  # type: ignore[misc]
    def __class__(self) -> type[MediaRef]:  # type: ignore[override]
        # What asks whether this is a ref is told so. msgspec looks past this and refuses to
        # encode one: nothing that is on its way can slip into a message that travels.
        return MediaRef

    @property
    def ref(self) -> MediaRef:
        return self._future.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future.result(), name)

    def __eq__(self, other: object) -> bool:
        return self.ref == unwrap_refs(other)

    def __hash__(self) -> int:
        return hash(self.ref)

    def __repr__(self) -> str:
        return repr(self.ref) if self._future.done() else "PendingRef()"


@dataclass
class PendingPuts:
    """What one rollout has put and not waited for yet."""

    store: MediaStore
    pool: Executor
    """The threads that put, `PUT_THREADS` for the rollouts of a process."""

    def __post_init__(self) -> None:
        self._waiting: dict[Future[MediaRef], int] = {}

    def put(self, image: Any) -> MediaRef:
        future = self.pool.submit(self.store.put, image)
        self._waiting[future] = _image_memory_bytes(image)
        return cast(MediaRef, PendingRef(future))

    async def settle(self) -> None:
        """Returns when everything that was put is in the store; raises what went wrong."""
        waiting = list(self._waiting)
        try:
            for future in waiting:
                # Shielded: a send that is given up must not take the image from another.
                await asyncio.shield(asyncio.wrap_future(future))
        finally:
            for future in waiting:
                if future.done():
                    self._waiting.pop(future, None)

    @property
    def memory_bytes(self) -> int:
        """Bytes of images that wait to be written; PIL images are counted uncompressed."""
        return sum(self._waiting.values())


def _image_memory_bytes(image: Any) -> int:
    """Bytes that an image takes in memory while it waits."""
    if isinstance(image, bytes | bytearray | memoryview):
        return len(image)
    size = getattr(image, "size", None)
    return 3 * size[0] * size[1] if isinstance(size, tuple) and len(size) == 2 else 0


def unwrap_refs(value: Any) -> Any:
    """Messages with true refs in the places of pending ones, which have all arrived."""
    return replace_images(value, lambda ref: ref.ref if type(ref) is PendingRef else ref)
