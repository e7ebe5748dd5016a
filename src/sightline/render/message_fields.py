"""What renderers look at in a message before it is read: roles, and where its images stand."""

from __future__ import annotations

from typing import Any

from sightline.media import MediaRef
from sightline.message import IMAGE_KINDS, ImagePart, Message, check_message_list

__all__ = ["check_message_list", "get_field", "list_image_paths"]


def get_field(message: Message | dict[str, Any], name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def list_image_paths(message: Message | dict[str, Any], path: str) -> list[str]:
    """Where the images of a message stand, as its author counts: joined texts shift nothing."""
    content = get_field(message, "content")
    if not isinstance(content, (list, tuple)):
        return []
    return [
        f"{path}.content[{i}]"
        for i, part in enumerate(content)
        if isinstance(part, (ImagePart, MediaRef))
        or (isinstance(part, dict) and part.get("type") in IMAGE_KINDS)
    ]
