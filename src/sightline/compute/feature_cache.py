"""Features of items, kept up to a size: of one version of a vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ItemFeatures:
    """An item as the text model takes it."""

    features: Float[Tensor, "tokens hidden"]
    digest: str
    """Digest of the pixels that the features were made from."""


class FeatureCache(LRUCache[str, ItemFeatures]):
    """Holds features of one vision version, by the keys of items. Used by one thread alone."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, getsizeof=lambda shown: shown.features.nbytes)
        self.hits = 0
        self.encoded = 0
        self.evicted = 0

    @property
    def bytes_held(self) -> int:
        return int(self.currsize)

    def find(self, key: str) -> ItemFeatures | None:
        features: ItemFeatures | None = self.get(key)
        self.hits += features is not None
        return features

    def put(self, key: str, shown: ItemFeatures) -> None:
        self.encoded += 1
        if shown.features.nbytes <= self.maxsize and key not in self:
            self[key] = shown

    def popitem(self) -> tuple[str, ItemFeatures]:
        self.evicted += 1
        return super().popitem()

    def clear(self) -> None:
        """Forgets all features, which is no eviction: they are of an older vision version."""
        for key in list(self):
            del self[key]

    def figures(self) -> dict[str, int]:
        """Numbers by the names that the metrics of every cache have."""
        return {
            "hits": self.hits,
            "misses": self.encoded,
            "evictions": self.evicted,
            "bytes": self.bytes_held,
        }
