"""The messages and files by which processes talk to one another.

What we send ourselves is keyed structs that refuse unknown fields; the answers of an engine
(`generate`) are read leniently, as it may say more than we know. Beside them stand the two other
forms in which processes meet: files (`file`) and the text that Prometheus scrapes (`prometheus`).
"""

from sightline.wire.array import Array
from sightline.wire.item import MediaItem, Slot, Span, VideoStep

__all__ = ["Array", "MediaItem", "Slot", "Span", "VideoStep"]
