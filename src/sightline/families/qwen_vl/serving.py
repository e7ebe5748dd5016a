"""Serve Qwen's models with vLLM."""

from __future__ import annotations

from sightline.errors import FamilyError
from sightline.families.protocol import Family, ServingSpec


class Serving(ServingSpec):
    UNTESTED_TYPES = ("qwen3_5_moe",)

    def check_cpu(self, family: Family, dtype: str) -> None:
        if family.packing.carries_state and dtype != "bfloat16":
            why = "vLLM computes recurrent layers on a CPU in bfloat16 only"
            fix = 'set [model] dtype = "bfloat16", or [inference] engine = "torch"'
            raise FamilyError(f"[model] dtype is {dtype!r}, and {why}", fix)
