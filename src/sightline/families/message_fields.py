"""Messages and tools as their authors wrote them: where images stand, and tools as JSON."""

from __future__ import annotations

import json
from typing import Any

from sightline.errors import MessageError
from sightline.media import MediaRef
from sightline.message import IMAGE_KINDS, ImagePart, Message, check_unicode

MAX_TOOL_DEPTH = 64
"""Levels of objects and lists that the JSON of a tool may have."""


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


def encode_tool(tool: Any, path: str) -> str:
    """A tool as JSON; `path` is for errors."""
    check_depth([tool], path)
    try:
        encoded = json.dumps(tool, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise MessageError.at(path, f"not JSON: {error}", "pass plain dicts") from None
    check_unicode(encoded, path)
    return encoded


def check_depth(value: Any, path: str, most: int = MAX_TOOL_DEPTH) -> None:
    """Raises MessageError where JSON has more than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        boxes = (one for box in inner for one in box if isinstance(one, dict | list | tuple))
        level = list({id(one): one for one in boxes}.values())  # each once, also in a circle
        if not level:
            return
    raise MessageError.at(path, f"nested deeper than {most} levels", "flatten the schema")
