"""Which policy version the engines hold. The orchestrator alone tells them to adopt."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sightline.errors import MediaError, WireError
from sightline.media import MediaStore
from sightline.wire.control import PublishedWeights
from sightline.wire.weights import MANIFEST, read_manifest

UNKNOWN_VERSION = -1
"""The version of engines that have not adopted one of this run."""
_VERSION_FOLDER = re.compile(r"v(\d{6})(\.\d+)?")


@dataclass
class PolicyUpdater:
    """Adopts every published version as it comes, the newest when several wait."""

    engines: Sequence[Callable[[str], Awaitable[None]]]
    """Each takes the path of a manifest and returns when the engine holds its weights."""
    weights: Path
    blobs: MediaStore
    """Has the files of versions that are published there."""
    version: int = 0
    """The version that all engines hold."""
    published: PublishedWeights | None = None
    """The newest version that the trainer has written."""
    pinned_versions: set[int] = field(default_factory=set)
    """Versions whose files stay although newer ones are in use."""
    on_adopted: Callable[[int, float], None] = lambda version, seconds: None
    """Hears which version all engines hold from now on, and how long they took."""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()

    def publish(self, published: PublishedWeights) -> None:
        """Takes note of what the trainer has written; a trainer that was started again makes
        versions anew that the engines are past."""
        if self.published is None or published.version >= self.published.version:
            self.published = published
            self._news.set()

    async def keep_adopting(self) -> None:
        """Runs beside the loop for as long as the run lasts."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self.published is not None
            newest, began = self.published, time.monotonic()
            await asyncio.gather(*(adopt(newest.manifest) for adopt in self.engines))
            async with self._changed:
                self.version = newest.version
                self._changed.notify_all()
            self.on_adopted(newest.version, time.monotonic() - began)
            await asyncio.to_thread(self._remove_old_versions, newest.version)

    async def wait_for_version(self, version: int) -> None:
        """Returns when the engines hold `version` or a newer one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    def _remove_old_versions(self, version: int) -> None:
        """Removes published versions that no engine can be told to adopt any more; parts before
        the manifests that name them. What the store does not take now goes with the next."""
        folders = {
            folder: int(found[1])
            for folder in self.weights.iterdir()
            if (found := _VERSION_FOLDER.fullmatch(folder.name))
        }
        pinned = set(self.pinned_versions)
        old = [one for one, number in folders.items() if number < version and number not in pinned]
        unused = _list_parts(old) - _list_parts(folders.keys() - set(old))
        try:
            for part in unused:
                self.blobs.remove(part)
        except MediaError as error:
            print(error, file=sys.stderr, flush=True)
            return
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)


def _list_parts(folders: Iterable[Path]) -> set[str]:
    """The parts and deltas of versions in the store."""
    found: set[str] = set()
    for folder in folders:
        with contextlib.suppress(WireError):  # half written, or half removed before a kill
            files = read_manifest(folder / MANIFEST).files
            found.update(digest for file in files for digest in file.stored)
    return found
