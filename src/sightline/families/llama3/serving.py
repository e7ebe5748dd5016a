"""Serve Llama 3 with vLLM's own model class, without images."""

from __future__ import annotations

from sightline.families.protocol import ServingSpec


class Serving(ServingSpec):
    LIMIT_MM_PER_PROMPT: dict[str, int] = {}
    VISION_PREFIXES = ()
