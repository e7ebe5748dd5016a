"""Sightline trains vision-language models with reinforcement learning, and shows what they saw.

The public names. All but the errors are loaded when they are first used, so that a command starts
quickly. Only `train`, `evaluate` and `open_run` load torch or transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from sightline.envs import BlockingChat, Chat, Conversation, Environment, Outcome, Task
    from sightline.families import load_family, load_renderer
    from sightline.launch.evaluate import evaluate
    from sightline.launch.jobs import train
    from sightline.media import MediaRef, MediaStore, open_store
    from sightline.message import Message, assistant, system, user, video
    from sightline.trace import Trace
    from sightline.view.notebook import open_run
    from sightline.wire import MediaItem

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
    "open_store",
    "system",
    "train",
    "user",
    "video",
]

_LAZY_NAMES = {
    "envs": ("BlockingChat", "Chat", "Conversation", "Environment", "Outcome", "Task"),
    "families": ("load_family", "load_renderer"),
    "launch.evaluate": ("evaluate",),
    "launch.jobs": ("train",),
    "media": ("MediaRef", "MediaStore", "open_store"),
    "message": ("Message", "assistant", "system", "user", "video"),
    "trace": ("Trace",),
    "view.notebook": ("open_run",),
    "wire": ("MediaItem",),
}
"""The modules below this one, and which public names come from each."""


def __getattr__(name: str) -> Any:
    for module, names in _LAZY_NAMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
