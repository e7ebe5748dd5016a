"""The messages and files that processes exchange.

Our own messages are structs that refuse unknown fields. Engine responses (`generate`) may have
unknown fields. Processes also exchange files (`file`), and text for Prometheus (`prometheus`).
"""

from sightline.wire.array import Array as Array
from sightline.wire.item import MediaItem as MediaItem
from sightline.wire.item import Slot as Slot
from sightline.wire.item import Span as Span
from sightline.wire.item import VideoStep as VideoStep
