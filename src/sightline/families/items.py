"""What every family checks of an item before it makes pixels of it."""

from __future__ import annotations

import json

from sightline.errors import FingerprintMismatch, Misaligned
from sightline.families.protocol import Family
from sightline.wire import MediaItem


def check_media_item(family: Family, item: MediaItem) -> None:
    """Raises unless `family` would make the same item of that image."""
    if item.family != family.name or item.fingerprint != family.fingerprint:
        raise FingerprintMismatch(
            f"the item of image {item.ref.digest[:12]} was made by {item.family} with settings "
            f"{item.fingerprint}; here {family.name} has {family.fingerprint}: "
            f"{json.dumps(family.settings, sort_keys=True)}",
            "give both sides one checkpoint folder and one set of pixel limits",
        )
    layout = family.layout(item.ref.width, item.ref.height)
    if item.grid != layout.grid:
        raise Misaligned(
            f"the item of image {item.ref.digest[:12]} has grid {item.grid}; "
            f"{item.ref.width}x{item.ref.height} gives {layout.grid}",
            "make items with family.item",
        )
