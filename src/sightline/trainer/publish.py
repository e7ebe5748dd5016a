"""How a new version leaves the trainer: as files, in a store, sent to engines that adopt it, or in
memory that they copy.

    loop --copy--> thread: files or manifest --PublishedWeights k--> orchestrator
      waits for: the version before this one     unblocked by: the disk, or engines that adopt

Every rank takes part in the copy: tensors are gathered one by one, so that no device holds the
model twice. After it the next step may begin; versions leave in their order. What leaves is plain,
for adapters are merged on the way; or, for engines that merge, it is adapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from sightline.compute.broadcast import Broadcaster
from sightline.compute.host_copy import HostCopy
from sightline.compute.shared_weights import SharedWeights
from sightline.compute.tensor_file import NamedTensors
from sightline.compute.weights import StorePublisher, write_weights
from sightline.trainer.background_task import BackgroundTask
from sightline.trainer.lora import select_published
from sightline.wire.weights import Adapter, Manifest


@dataclass(frozen=True, slots=True)
class PublishTiming:
    began: float
    ended: float
    """When its manifest was on the disk; in seconds since 1970, as `began`."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def hidden_share(self, busy: tuple[float, float]) -> float:
        """The fraction of that time that a step, busy from `busy[0]` to `busy[1]`, ran beside."""
        beside = min(self.ended, busy[1]) - max(self.began, busy[0])
        return max(beside, 0.0) / self.seconds if self.seconds > 0 else 0.0


Announce = Callable[[Path, Manifest], None]


@dataclass
class AsyncPublisher:
    """Rank 0's part: one version at a time is on its way."""

    root: Path
    """Folder of the versions."""
    dtype: torch.dtype
    background_task: BackgroundTask
    broadcaster: Broadcaster | None = None
    """Sends tensors to the engines; None where they read them from files."""
    store: StorePublisher | None = None
    """Takes the files of every version; None where engines read them from `root`."""
    adapter: Adapter | None = None
    """The base of adapters, where they leave unmerged."""
    run: str = ""
    """Id of the run, which every manifest carries."""
    copy: HostCopy | SharedWeights = field(default_factory=HostCopy)
    """Shared, where servers of this machine copy it themselves."""
    previous: PublishTiming | None = None
    """When the version before the newest was published."""
    _last: PublishTiming | None = None

    def put(self, model: nn.Module, step: int, vision_version: int, tell: Announce) -> None:
        """Returns when the weights may change again; `tell` is called by the thread."""
        self.background_task.wait()
        self.previous, began = self._last, time.time()
        self.copy.take(*select_published(model, self.adapter, self.dtype))
        work = partial(self._publish, step, vision_version, tell, began)
        self.background_task.start(f"publishing version {step}", work)

    def _publish(self, step: int, vision_version: int, tell: Announce, began: float) -> None:
        tensors = self.copy.tensors()
        path, manifest = self.write(tensors, step, vision_version)
        self._last = PublishTiming(began, time.time())
        tell(path, manifest)
        if self.broadcaster is not None:
            self.broadcaster.send(manifest, tensors)

    def write(self, tensors: NamedTensors, step: int, vision_version: int) -> tuple[Path, Manifest]:
        """Puts a manifest on the disk, with the tensors where files are read."""
        put = write_weights if self.broadcaster is None else self.broadcaster.announce
        if isinstance(self.copy, SharedWeights):
            put = self.copy.announce
        path, manifest = put(self.root, tensors, step, vision_version, self.adapter, self.run)
        if self.store is not None:
            manifest = self.store.put(path, manifest)
        return path, manifest
