"""Features of images, kept up to a size: of one version of a vision tower."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cachetools import LRUCache


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
        self.hits = 0
        self.encoded = 0
        self.evicted = 0
        self._entries: LRUCache[str, ImageFeatures] = LRUCache(
            max_bytes, getsizeof=lambda shown: shown.nbytes
        )

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_held(self) -> int:
        return int(self._entries.currsize)

    def find(self, key: str) -> ImageFeatures | None:
        shown = self._entries.get(key)
        self.hits += shown is not None
        return shown

    def put(self, key: str, shown: ImageFeatures) -> None:
        self.encoded += 1
        if shown.nbytes <= self.max_bytes and key not in self._entries:
            num_before = len(self._entries)
            self._entries[key] = shown
            self.evicted += num_before + 1 - len(self._entries)

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
