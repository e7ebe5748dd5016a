"""What renderers look at in a message before it is read: roles, and where its images stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sightline.errors import MessageError
from sightline.media import MediaRef
from sightline.message import IMAGE_KINDS, ImagePart, Message
from sightline.render.protocol import Messages


def check_message_list(messages: Messages, name: str) -> None:
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise MessageError.at(name, f"a {type(messages).__name__}", "pass a list of messages")


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
