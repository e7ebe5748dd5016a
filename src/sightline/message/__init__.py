"""Messages and their parts, exchanged between environments and models.

A message is an OpenAI-style dict or a struct from `parts`. `to_message` converts dicts to structs,
and images and videos to refs, when messages are received. All later code uses only structs.
"""

from sightline.message.parts import (
    AssistantMessage,
    ImagePart,
    Message,
    Part,
    TextPart,
    ToolCall,
    VideoPart,
    assistant,
    join_texts,
    put_images,
    system,
    text,
    user,
    video,
)
from sightline.message.read import (
    ROLES,
    ImageResolver,
    check_unicode,
    is_whole_text,
    to_message,
    to_messages,
    to_openai_message,
)

__all__ = [
    "ROLES",
    "AssistantMessage",
    "ImagePart",
    "ImageResolver",
    "Message",
    "Part",
    "TextPart",
    "ToolCall",
    "VideoPart",
    "assistant",
    "check_unicode",
    "is_whole_text",
    "join_texts",
    "put_images",
    "system",
    "text",
    "to_message",
    "to_messages",
    "to_openai_message",
    "user",
    "video",
]
