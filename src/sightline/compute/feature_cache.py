"""Features of images, kept up to a size: of one version of a vision tower."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """An image as the text model takes it."""

    features: torch.Tensor
    digest: str
    """Of the pixels that the features were made from."""

    @property
    def nbytes(self) -> int:
        return self.features.nbytes


class FeatureCache:
    """Holds features of one vision version, by the keys of items. Used by one thread alone."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes_held = 0
        self.hits = 0
        self.encoded = 0
        self.evicted = 0
        self._entries: OrderedDict[str, ImageFeatures] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> ImageFeatures | None:
        shown = self._entries.get(key)
        if shown is not None:
            self._entries.move_to_end(key)
            self.hits += 1
        return shown

    def put(self, key: str, shown: ImageFeatures) -> None:
        self.encoded += 1
        if shown.nbytes > self.max_bytes or key in self._entries:
            return
        self._entries[key] = shown
        self.bytes_held += shown.nbytes
        while self.bytes_held > self.max_bytes:
            _, old = self._entries.popitem(last=False)
            self.bytes_held -= old.nbytes
            self.evicted += 1

    def figures(self) -> dict[str, int]:
        """By the names that the metrics of every cache have."""
        return {
            "hits": self.hits,
            "misses": self.encoded,
            "evictions": self.evicted,
            "bytes": self.bytes_held,
        }

    def clear(self) -> None:
        self._entries.clear()
        self.bytes_held = 0
