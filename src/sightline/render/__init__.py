"""Messages to tokens and back.

The rest of the system knows `Renderer`. `families/*/render.py` implement it with the `Emitter` and
the `Tokenizer` of this folder, which imports neither torch nor transformers.
"""

from sightline.render.emitter import Emitter
from sightline.render.protocol import Bridged, Refused, Rendered, Renderer, Tools
from sightline.render.template import ChatTemplate, TemplateError
from sightline.render.tokenizer import Tokenizer

__all__ = [
    "Bridged",
    "ChatTemplate",
    "Emitter",
    "Refused",
    "Rendered",
    "Renderer",
    "TemplateError",
    "Tokenizer",
    "Tools",
]
