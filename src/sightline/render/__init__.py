"""Conversion of messages to tokens and back.

`Renderer` is the public interface. `families/*/render.py` implement it with this folder's `Emitter`
and `Tokenizer`. This folder imports neither torch nor transformers.
"""

from sightline.render.emitter import Emitter
from sightline.render.protocol import Bridged, Refused, Rendered, Renderer, Tools
from sightline.render.template import ChatTemplate, TemplateError
from sightline.render.tokenizer import Tokenizer
from sightline.render.vocabulary import check_vocabularies

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
    "check_vocabularies",
]
