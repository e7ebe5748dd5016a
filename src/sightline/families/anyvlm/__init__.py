"""Any image-and-text checkpoint of the installed transformers that no other family claims.

Nothing of it is known beforehand. `probe` asks the checkpoint's own processor, template and model
code at the first load, in a process that has transformers, and leaves what it found as data in the
folder (`findings`, which `load` reads), or refuses the checkpoint with the probe that failed.
`layout` has the rules by which a size becomes tokens, `vision` the family, `render` the template
as data, `calls` its tool calls, `processor` and `forward` the halves that import transformers,
`tiny` small checkpoints.
This file loads without torch and transformers.
"""

from __future__ import annotations

from typing import Any

from sightline.families.anyvlm.load import load_family
from sightline.families.anyvlm.render import AnyVLMRenderer

__all__ = ["claims", "load_family", "load_renderer"]

IS_FALLBACK = True
"""It is asked only where no other family claims a checkpoint."""


def claims(config: dict[str, Any]) -> bool:
    return isinstance(config.get("vision_config"), dict)


load_renderer = AnyVLMRenderer.load
