"""Rotary position embeddings whose frequencies would depend on the longest sequence of a batch.

The rope types `dynamic` and `longrope` change their frequencies when a position exceeds the
checkpoint's original length. transformers applies the longest position's frequencies to the whole
batch. Sequences would then change each other, and cached keys would not match later queries. Up
to the original length, the frequencies are constant. We keep those and refuse longer sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sightline.errors import ConfigError, FamilyError

LIMITS = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""The setting with the original length, by rope type."""
TOWERS = ("vision_config", "audio_config")


def _find_rope_settings(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the rope types of a config's text models, with the original length of each."""
    for key in ("rope_parameters", "rope_scaling"):
        settings = config.get(key) or {}
        nested = [v for v in settings.values() if isinstance(v, dict)]  # one for each kind of layer
        for rope in nested or [settings]:
            kind = str(rope.get("rope_type") or rope.get("type") or "")
            for name, limit in LIMITS.items():
                if name in kind:
                    yield kind, _get_length(kind, limit, rope.get(limit) or config.get(limit))
    for key, part in config.items():
        if isinstance(part, dict) and key not in TOWERS:
            yield from _find_rope_settings(part)


def _get_length(kind: str, setting: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        fix = f"add {setting}, the length in tokens that the checkpoint was trained on"
        raise FamilyError(f"config.json has the rope type {kind!r}, but no {setting}", fix)
    return value


def find_position_limit(config: dict[str, Any]) -> int:
    """Return the length up to which all frequencies are constant; 0 if they always are."""
    return min((limit for _, limit in _find_rope_settings(config)), default=0)


def check_length(limit: int, length: int, setting: str = "[inference] max_model_len") -> None:
    """Raise if a sequence may be longer than the checkpoint's frequencies allow. A `length` of 0 is
    no limit."""
    if limit and not 0 < length <= limit:
        raise ConfigError(
            f"{setting} = {length}, but the rotary frequencies of this checkpoint change for all "
            f"sequences of a batch when one exceeds {limit} tokens",
            f"set {setting} = {limit} or less",
        )


def pin_frequencies(model: Any) -> None:
    """Stop a loaded transformers model from changing its frequencies in a forward pass."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layer: _pin(name) for layer, name in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = _pin(kind)


def _pin(kind: str) -> str:
    return "pinned" if any(name in kind for name in LIMITS) else kind
