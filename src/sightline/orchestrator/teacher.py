"""A teacher on a server: it scores sampled tokens before their batch is written.

    group with a verdict --start--> the teacher's server --finish--> samples of the batch on disk

The ids are scored as the policy sampled them. Only images are laid out for the teacher's family.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from sightline.errors import Misaligned, PolicyMismatch
from sightline.families import Family
from sightline.families.relayout import lay_out_again
from sightline.orchestrator.run_state import Progress
from sightline.rollout.client import GenerateClient
from sightline.rollout.scoring import ServerPromptScorer
from sightline.wire.array import Array
from sightline.wire.sample import Sample

LEASE = hashlib.sha256(b"teacher").hexdigest()
"""The lease of every teacher's server. Runs share it, and no run's weights are adopted under it."""
LEASE_S = 60.0
RENEW_EVERY_S = 10.0
MAX_IN_FLIGHT = 64


@dataclass
class ServedTeacher:
    client: GenerateClient
    family: Family
    pad_id: int
    progress: Progress
    """Keeps the label of the teacher's weights, so that a resumed run has the same teacher."""
    _tasks: dict[int, tuple[Sample, asyncio.Task[Sample]]] = field(default_factory=dict)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_IN_FLIGHT))

    def start(self, samples: Iterable[Sample]) -> None:
        """Start to score samples, which later go to `finish` or are dropped."""
        for sample in samples:
            self._tasks[id(sample)] = sample, asyncio.ensure_future(self._score(sample))

    async def finish(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples with the teacher's logprobs. Replayed samples have them already."""
        tasks, self._tasks = self._tasks, {}
        wanted = {id(sample) for sample in samples}
        for name, (_, task) in tasks.items():
            if name not in wanted:
                task.cancel()
        return [await tasks[id(s)][1] if id(s) in tasks else s for s in samples]

    async def keep_lease(self) -> None:
        """Renew the lease, so that no run replaces the teacher's weights."""
        await self.client.wait_healthy()
        while True:
            await self.client.lease(LEASE, LEASE_S)
            await asyncio.sleep(RENEW_EVERY_S)

    async def _score(self, sample: Sample) -> Sample:
        slots: list[Any] = [replace(s, item=sample.items[s.item]) for s in sample.slots]
        ids, slots, index = lay_out_again(
            sample.token_ids.numpy().tolist(), slots, self.family, self.pad_id
        )
        score = ServerPromptScorer(self.client, self.family.modality)
        async with self._room:
            scores = await score(ids, slots, sample.temperature)
        self._check_weights(scores.version)
        for slot, mine, digest in zip(slots, sample.slots, scores.pixel_digests, strict=True):
            is_same = slot.item.fingerprint == sample.items[mine.item].fingerprint
            if is_same and digest and mine.pixel_digest and digest != mine.pixel_digest:
                raise Misaligned(
                    f"sample {sample.trace_id}: the teacher saw pixels {digest} of "
                    f"{slot.item.name}, and the policy {mine.pixel_digest}",
                    "run the same Pillow on the teacher's server",
                )
        places = index[sample.trained.numpy()]
        logprobs = [scores.logprobs[place] for place in places]
        if any(logprob is None for logprob in logprobs):
            raise Misaligned(
                f"sample {sample.trace_id}: the teacher's server gave a trained token no logprob",
                "see the server's log",
            )
        return replace(sample, teacher_logprobs=Array.of(np.array(logprobs), "float32"))

    def _check_weights(self, label: str) -> None:
        self.progress.teacher = self.progress.teacher or label
        if label != self.progress.teacher:
            raise PolicyMismatch(
                f"the teacher at {self.client.base_url} has weights {label}, but the run began "
                f"with {self.progress.teacher}",
                "start the server again with the folder in [algorithm] teacher",
            )
