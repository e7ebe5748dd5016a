"""The checkpoint with the best held-out reward, in a folder that transformers can load.

Published weights are copied byte by byte, and adapters are merged into their base. All other files
come from the checkpoint that the run started from.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sightline.media import MediaStore
from sightline.orchestrator.run_state import RunState
from sightline.regular_file import open_file
from sightline.wire.file import hash_file, replace_checkpoint, write_sums
from sightline.wire.weights import MANIFEST, fetch_files, is_transposed, read_manifest

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
            if manifest.adapter is None:
                digest = merge_safetensors(weights, others, part / WEIGHTS)
            else:
                from sightline.compute.lora_weights import write_merged  # imports torch

                digest = write_merged(weights, manifest.adapter, others, part / WEIGHTS)
            write_sums(part, {WEIGHTS: digest})
        return digest


def merge_safetensors(weights: list[Path], others: list[Path], target: Path) -> str:
    """Merge `weights` into one file, in the layout of `others`, and return its digest.

    Tensors that only `others` have are copied too.
    """
    sources: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    shapes: dict[str, list[int]] = {}
    for path in (*weights, *others):
        with open_file(path) as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(start - 8))
        for name, described in header.items():
            if name == "__metadata__":
                continue
            source = sources.setdefault(name, (path, start, described))
            if name not in shapes or is_transposed(described["shape"], source[2]["shape"]):
                shapes[name] = described["shape"]
    header_out: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (_, _, described) in sources.items():
        first, last = described["data_offsets"]
        offsets = [offset, offset + last - first]
        header_out[name] = {**described, "shape": shapes[name], "data_offsets": offsets}
        offset += last - first
    encoded = json.dumps(header_out, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with open(target, "wb") as out:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            out.write(data)

        write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (path, start, described) in sources.items():
            (first, last), shape = described["data_offsets"], described["shape"]
            stored = np.memmap(path, mode="r")[start + first : start + last]
            if shapes[name] == shape:
                write(stored.data)
                continue
            # Transpose each matrix in a stack, for any dtype.
            stack = stored.view(f"V{len(stored) // math.prod(shape)}").reshape(-1, *shape[-2:])
            for matrix in stack:
                write(matrix.T.tobytes())
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()
