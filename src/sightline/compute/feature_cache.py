"""A size-limited cache of item features, for one version of the vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ItemFeatures:
    """An item's features, the input of the text model."""

    features: Float[Tensor, "tokens hidden"]
    digest: str
    """Digest of the pixels that the features were computed from."""


class FeatureCache(LRUCache[str, ItemFeatures]):
    """Features of one vision version, by item key. Not thread-safe."""

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
        """Remove all features of an old vision version, without counting them as evicted."""
        for key in list(self):
            del self[key]

    def figures(self) -> dict[str, int]:
        """Return the cache's statistics, under the metric names that all caches share."""
        return {
            "hits": self.hits,
            "misses": self.encoded,
            "evictions": self.evicted,
            "bytes": self.bytes_held,
        }
