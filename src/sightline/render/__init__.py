"""Conversion of messages to tokens and back.

`Renderer` is the public interface. `families/*/render.py` implement it with this folder's `Emitter`
and `Tokenizer`. This folder imports neither torch nor transformers.
"""

from sightline.render.emitter import Emitter as Emitter
from sightline.render.protocol import Bridged as Bridged
from sightline.render.protocol import Refused as Refused
from sightline.render.protocol import Rendered as Rendered
from sightline.render.protocol import Renderer as Renderer
from sightline.render.protocol import Tools as Tools
from sightline.render.template import ChatTemplate as ChatTemplate
from sightline.render.template import TemplateError as TemplateError
from sightline.render.tokenizer import Tokenizer as Tokenizer
from sightline.render.vocabulary import check_vocabularies as check_vocabularies
