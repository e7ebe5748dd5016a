"""`[lora]`: LoRA adapters on frozen weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sightline.config.section import ConfigSection


class LoraConfig(ConfigSection):
    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters, which are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*",)
    """Linear layers of the text model that get adapters, by patterns of their names."""
    vision_targets: tuple[str, ...] = ()
    """Linear layers of the vision tower that get adapters, by patterns of their names; without any
    the tower trains whole, or not at all."""
    publish: Literal["merged", "adapter"] = "merged"
    """Whether the engines of a run are given whole weights, or adapters to merge."""
