"""The replay buffer: groups of earlier batches that train again.

A replayed sample keeps the logprobs and versions of its sampling, so the loss corrects for its age.
The buffer holds no pixels. A resumed run reads it from the batch files, which are kept as long.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sightline.config.sections import OrchestratorConfig
from sightline.regular_file import read_bytes
from sightline.rollout.evaluation import derive_seed
from sightline.run import RunDir
from sightline.wire.sample import Batch, Sample


@dataclass
class ReplayBuffer:
    num_groups: int = 0
    """Number of groups that each batch repeats. 0 turns the buffer off."""
    max_age: int = 1
    """Number of steps after which a group is forgotten."""
    seed: int = 0
    _groups: dict[str, tuple[int, list[Sample]]] = field(default_factory=dict)
    """The step and the samples of each group."""

    @classmethod
    def open(cls, run_dir: RunDir, settings: OrchestratorConfig, seed: int) -> ReplayBuffer:
        """Create a buffer, with the groups of a resumed run."""
        buffer = cls(settings.replay_groups, settings.replay_max_age, seed)
        files = sorted(run_dir.list_batches()) if buffer.num_groups else []
        for _, file in files[-buffer.max_age :]:
            buffer.add(Batch.from_bytes(read_bytes(file)))
        return buffer

    def add(self, batch: Batch) -> None:
        """Remember the groups that a batch trains for the first time, and forget old ones."""
        if not self.num_groups:
            return
        for sample in batch.samples:
            if sample.group_id not in batch.replayed:
                self._groups.setdefault(sample.group_id, (batch.step, []))[1].append(sample)
        oldest = batch.step + 1 - self.max_age
        self._groups = {name: g for name, g in self._groups.items() if g[0] >= oldest}

    def draw(self, step: int) -> dict[str, list[Sample]]:
        """Return groups that train again in `step`. The run's seed determines them."""
        rng = random.Random(derive_seed(self.seed, f"replay of step {step}"))
        names = rng.sample(sorted(self._groups), min(self.num_groups, len(self._groups)))
        return {name: self._groups[name][1] for name in names}

    @property
    def num_kept_steps(self) -> int:
        """Number of steps whose batch files a resume needs, even if a checkpoint covers them."""
        return self.max_age if self.num_groups else 0
