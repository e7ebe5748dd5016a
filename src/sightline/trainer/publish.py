"""How a new version leaves the trainer, in the order of versions.

    loop --copy--> thread: the transport's manifest --PublishedWeights k--> orchestrator
      waits for: the version before this one     unblocked by: the disk, or servers that adopt

Every rank takes part in the copy: tensors are gathered one by one, so that no device holds the
model twice. After it the next step may begin. Adapters are merged on the way, or leave unmerged
for servers that merge them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from sightline.compute.weight_transport import WeightPublisher
from sightline.trainer.background_task import BackgroundTask
from sightline.trainer.lora import select_published
from sightline.wire.weights import Adapter, Manifest


@dataclass(frozen=True, slots=True)
class PublishTiming:
    began: float
    ended: float
    """When its manifest was on the disk. Both are in seconds since 1970."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def hidden_share(self, busy: tuple[float, float]) -> float:
        """Return the fraction of that time during which a step ran, from `busy[0]` to `busy[1]`."""
        overlap = min(self.ended, busy[1]) - max(self.began, busy[0])
        return max(overlap, 0.0) / self.seconds if self.seconds > 0 else 0.0


Announce = Callable[[Path, Manifest], None]


@dataclass
class AsyncPublisher:
    """Rank 0's part: one version at a time is on its way."""

    transport: str
    """The transport's name, which every manifest carries."""
    publisher: WeightPublisher
    dtype: torch.dtype
    background_task: BackgroundTask
    adapter: Adapter | None = None
    """The base of adapters, where they leave unmerged."""
    run: str = ""
    """Id of the run, which every manifest carries."""
    previous: PublishTiming | None = None
    """When the version before the newest was published."""
    _last: PublishTiming | None = None

    def put(self, model: nn.Module, step: int, vision_version: int, tell: Announce) -> None:
        """Publish version `step`; return when the weights may change again.

        A background thread calls `tell` when the manifest is on the disk.
        """
        self.background_task.wait()
        self.previous, began = self._last, time.time()
        self.publisher.take(*select_published(model, self.adapter, self.dtype))
        draft = Manifest(
            step, vision_version, [], transport=self.transport, adapter=self.adapter, run=self.run
        )
        work = partial(self._publish, draft, tell, began)
        self.background_task.start(f"publishing version {step}", work)

    def _publish(self, draft: Manifest, tell: Announce, began: float) -> None:
        path, manifest = self.publisher.write(draft)
        self._last = PublishTiming(began, time.time())
        tell(path, manifest)
        self.publisher.send(manifest)
