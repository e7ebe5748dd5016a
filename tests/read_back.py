"""Published weights, read back for comparisons."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sightline.compute.weight_transport import WeightReceiver
from sightline.wire.weights import Manifest, read_manifest


def read_weights(manifest_path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Return a manifest and a copy of its tensors, for any transport."""
    manifest = read_manifest(manifest_path)
    with WeightReceiver().open_tensors(manifest_path.parent, manifest) as tensors:
        return manifest, {name: tensor.cpu().clone() for name, tensor in tensors.items()}
