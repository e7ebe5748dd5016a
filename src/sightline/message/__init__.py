"""Messages and parts, in which environments and models talk.

A message is an OpenAI-shaped dict or a struct of `parts`. `to_message` converts dicts to structs
once, where messages come in, and images and videos to refs. All later code sees structs only.
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
    "system",
    "text",
    "to_message",
    "to_messages",
    "to_openai_part",
    "user",
    "video",
]
