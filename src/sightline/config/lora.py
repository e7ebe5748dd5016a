"""`[lora]`: small matrices beside frozen ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sightline.config.section import ConfigSection


class LoraConfig(ConfigSection):
    rank: int = Field(0, ge=0, description="Rank of the adapters; 0 trains the weights themselves.")
    alpha: float = Field(
        32.0, gt=0, description="Scale of the adapters, which count with alpha / rank."
    )
    targets: tuple[str, ...] = Field(
        ("*",),
        description="Linear layers of the text model that get adapters, by patterns of their names.",
    )
    vision_targets: tuple[str, ...] = Field(
        (),
        description="Linear layers of the vision tower that get adapters, by patterns of their names; without any it trains whole, or not at all.",
    )
    publish: Literal["merged", "adapter"] = Field(
        "merged",
        description="Whether the engines of a run are given whole weights, or adapters to merge.",
    )
