"""Images of a request go into the store first; what is parsed afterwards holds refs.

Only the content of messages is walked. What is not of the shape of an image part is left as it
is: the parser refuses it with its path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sightline.media import MediaRef
from sightline.message import IMAGE_KINDS, get_image_source

ResolveUrl = Callable[[str, str], MediaRef]
"""The ref of a url, and the JSON path that an error names."""


def resolve_images(messages: list[Any], take: ResolveUrl) -> list[Any]:
    """The messages with a ref in place of every url of an image."""
    return [_resolve_message(message, take, f"messages[{i}]") for i, message in enumerate(messages)]


def _resolve_message(message: Any, take: ResolveUrl, path: str) -> Any:
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list) and any(map(_is_image, content)):
        message = {
            **message,
            "content": [
                _resolve_part(part, take, f"{path}.content[{k}]") if _is_image(part) else part
                for k, part in enumerate(content)
            ],
        }
    # The newer name of the role; templates know the older one.
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_KINDS


def _resolve_part(part: dict[str, Any], take: ResolveUrl, path: str) -> dict[str, Any]:
    image, where = get_image_source(part, path)
    return {"type": "image", "ref": image if isinstance(image, MediaRef) else take(image, where)}
