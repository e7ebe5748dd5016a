"""Messages and parts: what environments speak.

OpenAI-shaped dicts and the structs of `parts` mean the same; `to_message` of `read` turns the first
into the second, once, where messages come in. Images and videos become refs, and adjacent texts
become one. From there on there is one form.
"""

from sightline.message.parts import (
    AssistantMessage,
    ImagePart,
    Message,
    Part,
    TextPart,
    ToolCall,
    VideoFrame,
    VideoPart,
    assistant,
    build_part,
    join_texts,
    put_images,
    replace_images,
    system,
    text,
    user,
    video,
)
from sightline.message.read import (
    IMAGE_KINDS,
    ROLES,
    VIDEO_KINDS,
    ImageResolver,
    check_message_list,
    check_unicode,
    get_image_source,
    is_whole_text,
    to_message,
    to_messages,
    to_openai_part,
)

__all__ = [
    "IMAGE_KINDS",
    "ROLES",
    "VIDEO_KINDS",
    "AssistantMessage",
    "ImagePart",
    "ImageResolver",
    "Message",
    "Part",
    "TextPart",
    "ToolCall",
    "VideoFrame",
    "VideoPart",
    "assistant",
    "build_part",
    "check_message_list",
    "check_unicode",
    "get_image_source",
    "is_whole_text",
    "join_texts",
    "put_images",
    "replace_images",
    "system",
    "text",
    "to_message",
    "to_messages",
    "to_openai_part",
    "user",
    "video",
]
