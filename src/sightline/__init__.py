"""Sightline trains vision-language models with reinforcement learning, and shows what they saw.

The public names. Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sightline.envs import Chat, Environment
from sightline.errors import (
    ConfigError,
    EngineError,
    EnvironmentFailed,
    FamilyError,
    FingerprintMismatch,
    MediaCorrupt,
    MediaError,
    MediaMissing,
    MediaRefused,
    MessageError,
    Misaligned,
    PixelMismatch,
    SightlineError,
)
from sightline.families import load_family, load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.trace import Trace
from sightline.wire import MediaItem

if TYPE_CHECKING:
    from sightline.view.notebook import Run

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "ConfigError",
    "EngineError",
    "Environment",
    "EnvironmentFailed",
    "FamilyError",
    "FingerprintMismatch",
    "MediaCorrupt",
    "MediaError",
    "MediaItem",
    "MediaMissing",
    "MediaRef",
    "MediaRefused",
    "MediaStore",
    "MessageError",
    "Misaligned",
    "PixelMismatch",
    "SightlineError",
    "Trace",
    "load_family",
    "load_renderer",
    "open_run",
]


def open_run(path: str | Path) -> Run:
    """The run in a run directory, for a notebook: metrics, rollouts, traces, images."""
    from sightline.view import notebook

    return notebook.open_run(path)
