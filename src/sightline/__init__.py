"""Sightline trains vision-language models with reinforcement learning, and shows what they saw.

The public names. Importing this loads neither torch nor transformers; `train`, `evaluate` and
`open_run` load what they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sightline.envs import BlockingChat, Chat, Conversation, Environment, Outcome, Task
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
from sightline.message import Message, assistant, system, user
from sightline.trace import Trace
from sightline.wire import MediaItem

if TYPE_CHECKING:
    from sightline.launch.evaluate import evaluate
    from sightline.launch.train import train
    from sightline.view.notebook import open_run

__version__ = "0.1.0"

__all__ = [
    "BlockingChat",
    "Chat",
    "ConfigError",
    "Conversation",
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
    "Message",
    "MessageError",
    "Misaligned",
    "Outcome",
    "PixelMismatch",
    "SightlineError",
    "Task",
    "Trace",
    "assistant",
    "evaluate",
    "load_family",
    "load_renderer",
    "open_run",
    "system",
    "train",
    "user",
]

_LAZY_NAMES = {
    "evaluate": "sightline.launch.evaluate",
    "open_run": "sightline.view.notebook",
    "train": "sightline.launch.train",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
