"""Makes the engines adopt policy versions. Nothing else tells them to."""

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
"""The version of engines that have not adopted any version of this run."""
_VERSION_FOLDER = re.compile(r"v(\d{6})(\.\d+)?")


@dataclass
class PolicyUpdater:
    """Adopts every published version as it comes, or the newest when several wait."""

    engines: Sequence[Callable[[str], Awaitable[None]]]
    """Each makes an engine adopt the manifest at a path, and returns when it has."""
    weights: Path
    blobs: MediaStore
    """The store of versions that are published there."""
    version: int = 0
    """The version that all engines hold."""
    published: PublishedWeights | None = None
    """The newest version that the trainer has written."""
    pinned_versions: set[int] = field(default_factory=set)
    """Versions whose files stay although newer versions are in use."""
    on_adopted: Callable[[int, float], None] = lambda version, seconds: None
    """Called with the version that all engines now hold, and the seconds it took."""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()

    def publish(self, published: PublishedWeights) -> None:
        """Note a published version. A restarted trainer may repeat versions that engines have."""
        if self.published is None or published.version >= self.published.version:
            self.published = published
            self._news.set()

    async def keep_adopting(self) -> None:
        """Adopt versions as they are published, until cancelled."""
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
        """Wait until the engines hold `version` or a newer one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    def _remove_old_versions(self, version: int) -> None:
        """Remove versions that no engine can adopt any more; parts before their manifests.

        If the store fails, the next call tries again.
        """
        folders = {
            folder: int(match[1])
            for folder in self.weights.iterdir()
            if (match := _VERSION_FOLDER.fullmatch(folder.name))
        }
        pinned = set(self.pinned_versions)
        old = [
            path for path, number in folders.items() if number < version and number not in pinned
        ]
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
    """Return the digests of all parts of these versions."""
    digests: set[str] = set()
    for folder in folders:
        with contextlib.suppress(WireError):  # half written, or half removed before a kill
            files = read_manifest(folder / MANIFEST).files
            digests.update(part for file in files for part in file.parts)
    return digests
