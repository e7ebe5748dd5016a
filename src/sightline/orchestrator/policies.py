"""The policy versions that a run has published, and how its engines adopt them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sightline.errors import EngineError, MediaError, PolicyMismatch, SightlineError, WireError
from sightline.media import MediaStore
from sightline.rollout.client import ChangeSignal
from sightline.run import EventLog
from sightline.trace import Trace
from sightline.wire.control import PublishedWeights
from sightline.wire.generate import WRONG_ANSWER
from sightline.wire.weights import (
    MANIFEST,
    Manifest,
    PolicyLabel,
    read_manifest,
    read_policies,
    resolve_manifest,
)

UNKNOWN_VERSION = -1
"""The version of engines that have not adopted any version of this run."""
_VERSION_FOLDER = re.compile(r"v(\d{6})(\.\d+)?")


@dataclass
class PolicyUpdater:
    """Makes the engines adopt each published version, or the newest if several are waiting.

    No other code makes engines adopt versions.
    """

    events: EventLog
    engines: Sequence[Callable[[str], Awaitable[None]]]
    """Functions that make an engine adopt the manifest at a path, and wait until it has."""
    weights: Path
    blobs: MediaStore
    """The store, for versions whose weights are published there."""
    version: int = 0
    """The version that all engines hold."""
    published: PublishedWeights | None = None
    """The newest version that the trainer has written."""
    pinned_versions: set[int] = field(default_factory=set)
    """Versions whose files are kept even if newer versions are in use."""

    def __post_init__(self) -> None:
        self._changed = ChangeSignal()
        self._news = asyncio.Event()

    def publish(self, published: PublishedWeights) -> None:
        """Record a published version. A restarted trainer may repeat versions."""
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
            self.version = newest.version
            self._changed.notify()
            self.events.write("adopted", newest.version, seconds=time.monotonic() - began)
            await asyncio.to_thread(self._remove_old_versions, newest.version)

    async def wait_for_version(self, version: int) -> None:
        """Wait until the engines hold `version` or a newer one."""
        while self.version < version:
            await self._changed.wait()

    def _remove_old_versions(self, version: int) -> None:
        """Remove versions that no engine can adopt any more, their parts before their manifests.

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
    """Return the digests of all parts in these versions."""
    digests: set[str] = set()
    for folder in folders:
        with contextlib.suppress(WireError):  # incomplete, because a process was killed
            files = read_manifest(folder / MANIFEST).files
            digests.update(part for file in files for part in file.parts)
    return digests


@dataclass
class PublishedPolicies:
    """The policies that this run has published. Only these may sample for it or be adopted."""

    run: str
    weights: Path
    """Folder with the run's versions and their history."""
    owns_servers: bool
    """Whether the run starts its servers. If so, they hold its checkpoint as version 0."""
    known: set[PolicyLabel] = field(init=False)
    last: int | None = None
    """The last version published to this process."""

    def __post_init__(self) -> None:
        self.known = read_policies(self.weights, self.run)
        if self.owns_servers:
            self.known.add(Manifest(version=0, vision_version=0, files=[], run=self.run).policy)

    def check_trace(self, trace: Trace) -> None:
        """Raise if an answer is invalid or from a different policy. This ends the run."""
        if trace.error_kind == WRONG_ANSWER:
            problem, _, fix = trace.error.partition("\n  fix: ")
            raise EngineError(f"rollout {trace.id}: {problem}", fix, WRONG_ANSWER, status=502)
        foreign = {span.policy for node in trace.nodes for span in node.versions} - self.known
        if foreign:
            label = min(foreign)
            names = {known.version: str(known) for known in sorted(self.known)}
            published = names.get(label.version, "nothing")
            raise PolicyMismatch(
                f"rollout {trace.id} was sampled by the weights {str(label)!r}, which run "
                f"{self.run} did not publish (it published {published} as version {label.version})",
                "make sure that nothing else changes the weights of this run's servers, then "
                "resume. The run did not train on that rollout",
            )

    def check_published(self, published: PublishedWeights, announced: int) -> None:
        """Raise unless this is the trainer's next version, trained on batches up to `announced`."""
        version, last = published.version, self.last
        if not 0 <= version <= announced or (last is not None and version != last + 1):
            raise self._refusal(
                published,
                f"batches up to step {announced} were announced, and the last version was {last}",
            )
        if not 0 <= published.checkpoint_step <= version:
            raise self._refusal(published, f"its checkpoint has step {published.checkpoint_step}")
        try:
            path = resolve_manifest(str(self.weights.parent / published.manifest), self.weights)
            if path.name != MANIFEST or path.parents[1] != Path(os.path.realpath(self.weights)):
                raise PolicyMismatch("its manifest is not in the folder of a version", "")
            label = read_manifest(path).policy
        except SightlineError as error:
            raise self._refusal(published, error.problem) from error
        if label[:3] != (version, published.epoch, self.run):
            raise self._refusal(published, f"its manifest says {label}")
        if label not in read_policies(self.weights, self.run):
            raise self._refusal(published, f"the history of versions lacks {label}")
        self.known.add(label)
        self.last = version

    def _refusal(self, published: PublishedWeights, why: str) -> PolicyMismatch:
        return PolicyMismatch(
            f"a message falsely says that version {published.version} of run {self.run} is "
            f"published: {why}",
            "find out which process sent it, then resume the run. No weights were adopted",
        )
