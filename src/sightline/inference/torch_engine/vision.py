"""Features of images, several in one pass of the vision tower."""

from __future__ import annotations

import numpy as np
import torch

from sightline.compute.feature_cache import ImageFeatures
from sightline.families import Family, Forward
from sightline.pixels import Pixels
from sightline.wire import MediaItem


def encode_images(
    forward: Forward,
    family: Family,
    images: dict[str, tuple[MediaItem, Pixels]],
    device: torch.device,
) -> dict[str, ImageFeatures]:
    """The features of all `images`, by key, in one pass of the vision tower."""
    items = [item for item, _ in images.values()]
    stacked = np.concatenate([pixels.patches for _, pixels in images.values()])
    features = forward.encode(torch.from_numpy(stacked).to(device), [item.grid for item in items])
    parts = features.split([family.num_tokens(item) for item in items])
    return {
        # A copy: a view would keep the features of the whole batch alive.
        key: ImageFeatures(part.clone() if len(items) > 1 else part, pixels.digest)
        for (key, (_, pixels)), part in zip(images.items(), parts, strict=True)
    }
