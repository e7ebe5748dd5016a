"""Messages to tokens and back. A renderer owns its images: there is no second path.

`Renderer` is what the rest of the system knows; `families/*/render.py` implement it with the
`Emitter` and the `Tokenizer` of this folder. Neither torch nor transformers is imported here.
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
