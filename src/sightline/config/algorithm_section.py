"""The `[algorithm]` section, and the settings that an algorithm's name stands for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sightline.config.secret_refs import InvalidSetting
from sightline.config.section import ConfigSection, Keywords, Mutable, SecretRef

PRESETS: dict[str, dict[str, Any]] = {
    "dr_grpo": {
        "advantage": "no_std",
        "aggregation": "constant",
        "aggregation_args": {"divisor": 1024.0},
    },
    "rloo": {"advantage": "rloo", "loss": "tis"},
    "gspo": {"loss": "gspo", "aggregation": "samples"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo", "aggregation": "samples"},
    "dpo": {"aggregation": "constant", "aggregation_args": {"divisor": 0.5}},
}
"""Defaults by `[algorithm] name`. All but DPO are GRPO with different parts."""


class AlgorithmConfig(ConfigSection):
    name: str = "grpo"
    """Algorithm of `sightline rl`: grpo, dr_grpo, dapo, rloo, reinforce++, ppo, gspo, cispo, sapo,
    distill, dpo, or 'module:Class' for your own (docs/algorithms.md). Some names change the
    defaults of the settings below. `sightline sft` supports only dpo."""
    args: Keywords = {}
    """Keyword arguments for the algorithm, such as gae_lambda of ppo."""
    advantage: str = "grpo"
    """Advantage function: grpo, no_std, rloo, or 'module:function' for your own."""
    advantage_args: Keywords = {}
    """Keyword arguments for the advantage function."""
    credit: str = "rollout"
    """How turns share the advantage: rollout (all the same), turn (by Outcome.per_turn), siblings
    (answers to the same prompt, for forked rollouts), or 'module:function' for your own."""
    loss: str = "ppo"
    """Policy loss: ppo, cispo, gspo, sapo, tis, mis, or 'module:function' for your own."""
    loss_args: Keywords = {}
    """Keyword arguments for the loss, such as clip_low, clip_high or correction."""
    aggregation: str = "tokens"
    """How token losses are averaged over a batch: tokens, samples, constant, or 'module:function'
    for your own."""
    aggregation_args: Keywords = {}
    """Keyword arguments for the aggregation, such as the divisor of constant."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty towards the starting checkpoint. 0 loads no reference model."""
    kl_estimator: Literal["exact", "k2", "k3"] = "exact"
    """How the KL penalty is computed: exact (a sum over the vocabulary), or k2 or k3 (estimates
    from the sampled token)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus. 0 adds none."""
    measure_entropy: Mutable[bool] = True
    """Whether to measure the policy's entropy, which takes one more pass over the logits."""
    teacher: str = ""
    """Checkpoint whose logprobs distill, dpo or your own algorithm uses. Empty uses the
    starting checkpoint, except for distill."""
    teacher_server: str = ""
    """Address of a server that runs the teacher. Empty loads the teacher into the trainer."""
    teacher_token: Mutable[SecretRef] = ""
    """Reference to that server's control token: env:NAME or file:PATH."""
    epochs: int = Field(1, ge=1)
    """Number of passes over each batch."""
    minibatches: int = Field(1, ge=1)
    """Number of parts that a batch is split into, with one update each. Groups are not split."""

    @model_validator(mode="after")
    def _check_teacher(self) -> AlgorithmConfig:
        if self.teacher_server and not self.teacher:
            raise InvalidSetting(
                "teacher_server is set without teacher",
                "set teacher to the folder that the server loads: its tokens are compared with "
                "the policy's",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Fill in the settings that the algorithm's name stands for. Explicit settings win."""
        if not isinstance(values, dict) or not isinstance(name := values.get("name"), str):
            return values
        return {**PRESETS.get(name, {}), **values}
