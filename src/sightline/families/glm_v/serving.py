"""Serve GLM's vision models with vLLM."""

from __future__ import annotations

from sightline.families.protocol import ServingSpec


class Serving(ServingSpec):
    # vLLM uses the model name of the first release. Its config must state that queries, keys and
    # values have biases.
    HF_OVERRIDES = {
        "architectures": ["Glm4vForConditionalGeneration"],
        "model_type": "glm4v",
        "text_config": {"attention_bias": True},
    }
    UNTESTED_TYPES = ("glm4v_moe",)
