"""What every section of a run file is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

MUTABLE: dict[str, Any] = {"mutable": True}
"""A setting that may change when a run is resumed."""


class ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
