"""The messages and files that processes exchange.

Our own messages are structs that refuse unknown fields. Engine responses (`generate`) may have
unknown fields. Processes also exchange files (`file`), and text for Prometheus (`prometheus`).
"""

from sightline.wire.array import Array
from sightline.wire.item import MediaItem, Slot, Span, VideoStep

__all__ = ["Array", "MediaItem", "Slot", "Span", "VideoStep"]
