"""Features of images: encoded once for each key and vision version, kept up to a size."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from sightline.families import Family, Forward
from sightline.pixels import Pixels
from sightline.wire import MediaItem


@dataclass(frozen=True, slots=True)
class Shown:
    """An image as the text model takes it."""

    features: torch.Tensor
    digest: str
    """Of the pixels that the features were made from."""

    @property
    def nbytes(self) -> int:
        return self.features.nbytes


class FeatureCache:
    """Holds features of one vision version. Used by the engine's thread alone."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes_held = 0
        self.hits = 0
        self.encoded = 0
        self.evicted = 0
        self._held: OrderedDict[str, Shown] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: str) -> Shown | None:
        shown = self._held.get(key)
        if shown is not None:
            self._held.move_to_end(key)
            self.hits += 1
        return shown

    def put(self, key: str, shown: Shown) -> None:
        self.encoded += 1
        if shown.nbytes > self.max_bytes or key in self._held:
            return
        self._held[key] = shown
        self.bytes_held += shown.nbytes
        while self.bytes_held > self.max_bytes:
            _, old = self._held.popitem(last=False)
            self.bytes_held -= old.nbytes
            self.evicted += 1

    def clear(self) -> None:
        self._held.clear()
        self.bytes_held = 0


def encode(
    forward: Forward,
    family: Family,
    images: dict[str, tuple[MediaItem, Pixels]],
    device: torch.device,
) -> dict[str, Shown]:
    """The features of all `images`, by key, in one pass of the vision tower."""
    items = [item for item, _ in images.values()]
    stacked = np.concatenate([pixels.patches for _, pixels in images.values()])
    features = forward.encode(torch.from_numpy(stacked).to(device), [item.grid for item in items])
    parts = features.split([family.num_tokens(item) for item in items])
    return {
        # A copy: a view would keep the features of the whole batch alive.
        key: Shown(part.clone() if len(items) > 1 else part, pixels.digest)
        for (key, (_, pixels)), part in zip(images.items(), parts, strict=True)
    }
