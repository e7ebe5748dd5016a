"""Pebble: a complete family, as small as possible.

Copy this folder to start another one. `vision` has layout, pixels and positions, `render` the chat
format, `forward` the torch half and `tiny` a small random checkpoint. This file imports neither
torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.message import ImageResolver

from .render import PebbleRenderer
from .vision import Pebble


def claims(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "pebble"


def load_family(path: Path, overrides: dict[str, int]) -> Pebble:
    return Pebble.load(path, overrides)


def load_renderer(path: Path, family: Pebble, resolver: ImageResolver) -> PebbleRenderer:
    return PebbleRenderer.load(path, family, resolver)
