"""The checkpoint with the best held-out reward, in a folder that transformers can load.

Published weights are copied bit by bit, and adapters are merged into their base. All other files
come from the checkpoint that the run started from.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sightline.media import MediaStore
from sightline.orchestrator.run_state import RunState
from sightline.wire.file import hash_file, replace_checkpoint, write_sums
from sightline.wire.weights import MANIFEST, fetch_files, read_manifest

WEIGHTS = "model.safetensors"


@dataclass
class BestCheckpoint:
    source: Path
    """The checkpoint folder that the run started from."""
    target: Path
    run_state: RunState
    blobs: MediaStore | None = None
    """The store, for versions whose weights are published there."""

    async def keep_if_best(self, step: int, measure: float, published: Path) -> None:
        """Keep the weights of `step` if its reward is higher than all earlier rewards."""
        progress = self.run_state.progress
        if progress.best_step and measure <= progress.best_measure:
            return
        # Copying a large checkpoint takes a while, so use a thread.
        progress.best_digest = await asyncio.to_thread(self._write, published)
        progress.best_step, progress.best_measure = step, measure
        self.run_state.save()

    def find_problem(self) -> str:
        """Describe damage to the best checkpoint of a resumed run. Empty if there is none."""
        progress, weights = self.run_state.progress, self.target / WEIGHTS
        if not progress.best_step:
            return ""
        if not weights.is_file():
            return f"{weights} is missing"
        if hash_file(weights) == progress.best_digest:
            return ""
        return f"{weights} is damaged: its checksum has changed"

    def forget(self) -> None:
        """Let the next evaluation write the best checkpoint again."""
        progress = self.run_state.progress
        progress.best_step, progress.best_measure, progress.best_digest = 0, 0.0, ""
        self.run_state.save()

    def _write(self, published: Path) -> str:
        """Write the checkpoint and return the digest of its weights."""
        parent = self.target.parent
        with (
            replace_checkpoint(self.source, self.target) as part,
            tempfile.TemporaryDirectory(dir=parent, prefix=".best-") as fetched,
        ):
            manifest = read_manifest(published / MANIFEST)
            if self.blobs is not None and any(file.parts for file in manifest.files):
                fetch_files(manifest, self.blobs, Path(fetched))  # into a folder of its own
                published = Path(fetched)
            weights, others = (
                sorted(folder.glob("*.safetensors")) for folder in (published, self.source)
            )
            from sightline.compute.lora_weights import write_merged  # imports torch

            digest = write_merged(weights, manifest.adapter, others, part / WEIGHTS)
            write_sums(part, {WEIGHTS: digest})
        return digest
