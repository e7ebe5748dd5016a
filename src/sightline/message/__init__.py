"""Messages and their parts, exchanged between environments and models.

A message is an OpenAI-style dict or a struct from `parts`. `to_message` converts dicts to structs,
and images and videos to refs, when messages are received. All later code uses only structs.
"""

from sightline.message.parts import AssistantMessage as AssistantMessage
from sightline.message.parts import ImagePart as ImagePart
from sightline.message.parts import Message as Message
from sightline.message.parts import Part as Part
from sightline.message.parts import TextPart as TextPart
from sightline.message.parts import ToolCall as ToolCall
from sightline.message.parts import VideoPart as VideoPart
from sightline.message.parts import assistant as assistant
from sightline.message.parts import join_texts as join_texts
from sightline.message.parts import put_images as put_images
from sightline.message.parts import system as system
from sightline.message.parts import text as text
from sightline.message.parts import user as user
from sightline.message.parts import video as video
from sightline.message.read import ROLES as ROLES
from sightline.message.read import ImageResolver as ImageResolver
from sightline.message.read import check_unicode as check_unicode
from sightline.message.read import is_whole_text as is_whole_text
from sightline.message.read import to_message as to_message
from sightline.message.read import to_messages as to_messages
from sightline.message.read import to_openai_message as to_openai_message
