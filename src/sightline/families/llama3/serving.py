"""How vLLM serves Llama 3: by itself, without images."""

from __future__ import annotations

from sightline.families.protocol import ServingSpec


class Serving(ServingSpec):
    LIMIT_MM_PER_PROMPT: dict[str, int] = {}
    VISION_PREFIXES = ()
