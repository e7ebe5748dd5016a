"""Serve GLM's vision models with vLLM."""

from __future__ import annotations

from pathlib import Path

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import ServingSpec


class Serving(ServingSpec):
    # vLLM uses the model name of the first release. Its config must state that queries, keys and
    # values have biases.
    HF_OVERRIDES = {
        "architectures": ["Glm4vForConditionalGeneration"],
        "model_type": "glm4v",
        "text_config": {"attention_bias": True},
    }

    def check_servable(self, folder: Path, takes_updates: bool) -> None:
        if (kind := read_json(folder / "config.json")["model_type"]) == "glm4v_moe":
            raise FamilyError(
                f"serving {kind} with vLLM is untested", 'set [inference] engine = "torch"'
            )
