"""The generic family: any image-and-text checkpoint of transformers that no other family claims.

At the first load, `probe` runs trials on the checkpoint's own processor, chat template and model
code, in a process that has transformers. It writes its `findings` into the folder, or refuses the
checkpoint with the trial that failed. `load` reads the findings. `image_tokens` chooses one of the
rules in `layout` by which an image size becomes tokens. `vision` is the family, `render` the
renderer, and `processor` and `forward` import transformers. This file does not.
"""

from __future__ import annotations

from typing import Any

from sightline.families.anyvlm.load import load_family
from sightline.families.anyvlm.render import AnyVLMRenderer

__all__ = ["claims", "load_family", "load_renderer"]

IS_FALLBACK = True
"""It is used only if no other family claims a checkpoint."""


def claims(config: dict[str, Any]) -> bool:
    return isinstance(config.get("vision_config"), dict)


load_renderer = AnyVLMRenderer.load
