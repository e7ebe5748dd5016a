"""Serve Qwen's models with vLLM."""

from __future__ import annotations

from pathlib import Path

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import Family, ServingSpec


class Serving(ServingSpec):
    def check_servable(self, folder: Path, takes_updates: bool) -> None:
        if (kind := read_json(folder / "config.json")["model_type"]) == "qwen3_5_moe":
            raise FamilyError(
                f"serving {kind} with vLLM is untested: on a CPU, its kernels for recurrent layers "
                "take no float32",
                'set [inference] engine = "torch"',
            )

    def check_cpu(self, family: Family, dtype: str) -> None:
        if family.packing.carries_state and dtype != "bfloat16":
            raise FamilyError(
                f"[model] dtype is {dtype!r}, and vLLM computes recurrent layers on a CPU in "
                "bfloat16 only",
                'set [model] dtype = "bfloat16", or [inference] engine = "torch"',
            )
