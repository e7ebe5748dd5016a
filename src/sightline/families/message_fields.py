"""Messages and tools as their authors wrote them: the paths of media, and tools as JSON."""

from __future__ import annotations

import json
from typing import Any

from sightline.errors import MessageError
from sightline.families.protocol import Family
from sightline.media import MediaRef
from sightline.message import (
    IMAGE_KINDS,
    VIDEO_KINDS,
    ImagePart,
    Message,
    VideoPart,
    check_unicode,
)

MAX_TOOL_DEPTH = 64
"""The maximum nesting of a tool's JSON."""


def get_field(message: Message | dict[str, Any], name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def list_media_paths(message: Message | dict[str, Any], path: str) -> list[tuple[str, str]]:
    """Return the path of every image and video of a message, with "an image" or "a video".

    Paths count the author's parts, before texts are joined.
    """
    content = get_field(message, "content")
    if not isinstance(content, (list, tuple)):
        return []
    kinds = ((f"{path}.content[{i}]", _find_kind(part)) for i, part in enumerate(content))
    return [(where, kind) for where, kind in kinds if kind is not None]


def _find_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    is_video_ref = isinstance(part, MediaRef) and part.is_video
    if isinstance(part, VideoPart) or kind in VIDEO_KINDS or is_video_ref:
        return "a video"
    is_image = isinstance(part, (ImagePart, MediaRef)) or kind in IMAGE_KINDS
    return "an image" if is_image else None


def check_shown(path: str, kind: str, family: Family, video_refusal: str) -> None:
    """Raise MessageError for an image or a video that a checkpoint cannot show."""
    if not family.shows_media:
        raise MessageError.at(
            path,
            f"{kind} cannot be shown: this checkpoint has no vision tower",
            "use a vision-language checkpoint",
        )
    if kind == "a video" and video_refusal:
        raise MessageError.at(
            path,
            f"a video cannot be shown: {video_refusal}",
            "send some of its frames as images",
        )


def encode_tool(tool: Any, path: str) -> str:
    """Return a tool as JSON. `path` is for errors."""
    check_depth([tool], path)
    try:
        encoded = json.dumps(tool, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise MessageError.at(path, f"not JSON: {error}", "pass plain dicts") from None
    check_unicode(encoded, path)
    return encoded


def check_depth(value: Any, path: str, most: int = MAX_TOOL_DEPTH) -> None:
    """Raise MessageError for JSON with more than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        values = (v.values() if isinstance(v, dict) else v for v in level)
        nested = (v for part in values for v in part if isinstance(v, dict | list | tuple))
        level = list({id(v): v for v in nested}.values())  # each once, even in a cycle
        if not level:
            return
    raise MessageError.at(path, f"nested deeper than {most} levels", "flatten the schema")
