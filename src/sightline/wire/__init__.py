"""Everything that crosses a process boundary: keyed structs, unknown fields refused."""

from sightline.wire.array import Array
from sightline.wire.item import MediaItem, Slot

__all__ = ["Array", "MediaItem", "Slot"]
