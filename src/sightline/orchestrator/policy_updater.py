"""Which policy version the engines hold. The orchestrator alone tells them to adopt."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sightline.wire.control import PublishedWeights

UNKNOWN_VERSION = -1
"""The version of engines that have not adopted one of this run."""
_VERSION_FOLDER = re.compile(r"v(\d{6})(\.\d+)?")


@dataclass
class PolicyUpdater:
    """Adopts every published version as it comes, the newest when several wait."""

    engines: Sequence[Callable[[str], Awaitable[None]]]
    """Each takes the path of a manifest and returns when the engine holds its weights."""
    weights: Path
    version: int = 0
    """The version that all engines hold."""
    published: PublishedWeights | None = None
    """The newest version that the trainer has written."""
    pinned_versions: set[int] = field(default_factory=set)
    """Versions whose files stay although newer ones are in use."""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()

    def publish(self, published: PublishedWeights) -> None:
        """Takes note of what the trainer has written."""
        self.published = published
        self._news.set()

    async def keep_adopting(self) -> None:
        """Runs beside the loop for as long as the run lasts."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self.published is not None
            newest = self.published
            await asyncio.gather(*(adopt(newest.manifest) for adopt in self.engines))
            async with self._changed:
                self.version = newest.version
                self._changed.notify_all()
            self._remove_old_versions(newest.version)

    async def wait_for_version(self, version: int) -> None:
        """Returns when the engines hold `version` or a newer one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    def _remove_old_versions(self, version: int) -> None:
        """Removes published versions that no engine can be told to adopt any more."""
        for folder in self.weights.iterdir():
            found = _VERSION_FOLDER.fullmatch(folder.name)
            if found and (old := int(found[1])) < version and old not in self.pinned_versions:
                shutil.rmtree(folder, ignore_errors=True)
