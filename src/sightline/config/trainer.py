"""`[trainer]`: how batches become weights."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sightline.config.section import MUTABLE, ConfigSection


class TrainerConfig(ConfigSection):
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    vision_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of the vision tower; `lr` where unset."
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="How the learning rate goes on after the warm-up, down to `final_lr_fraction`.",
    )
    final_lr_fraction: float = Field(
        0.0, ge=0, description="Learning rate at the last step, as a fraction of `lr`."
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps in which the learning rate rises from 0 to `lr`."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's second moment.")
    weight_decay: float = Field(
        0.0, ge=0, description="AdamW's weight decay, which applies to matrices alone."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    loss: str = Field(
        "ppo",
        description="The policy loss: ppo, cispo, gspo, tis, or 'module:function' of your own (docs/algorithms.md).",
    )
    loss_args: dict[str, Any] = Field(
        {}, description="Keyword arguments of the loss, such as clip_low, clip_high or ratio_cap."
    )
    loss_aggregation: str = Field(
        "tokens",
        description="What a token weighs in the loss of its batch: tokens, samples, constant, or 'module:function' of your own.",
    )
    loss_aggregation_args: dict[str, Any] = Field(
        {}, description="Keyword arguments of the aggregation, such as the divisor of constant."
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the KL to the starting checkpoint; 0 loads no reference.",
    )
    max_sequence_tokens: int = Field(
        0, ge=0, description="Longer samples are cut, never through an image; 0 cuts none."
    )
    micro_batch_tokens: int = Field(8192, ge=1, description="Most tokens of a micro-batch.")
    micro_batch_patches: int = Field(
        65536, ge=1, description="Most image patches of a micro-batch."
    )
    micro_batch_cost_model: list[float] = Field(
        [],
        description="What micro-batches cost, to balance ranks: the six numbers that `sightline bench cost` prints. Empty: operations counted from the model.",
    )
    checkpoint_every: int = Field(
        25, ge=1, description="Steps between checkpoints.", json_schema_extra=MUTABLE
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Newest checkpoints that are kept.", json_schema_extra=MUTABLE
    )
    keep_checkpoints_every: int = Field(
        0,
        ge=0,
        description="Checkpoints of every so many steps are kept as well; 0 keeps none of them.",
        json_schema_extra=MUTABLE,
    )
    master_dtype: Literal["float32", "model"] = Field(
        "float32",
        description="Precision of the weights that the optimizer updates; `model` is [model] dtype.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Whether a block's activations are computed again in the backward pass.",
        json_schema_extra=MUTABLE,
    )
    compile_backend: str = Field(
        "", description="Backend of torch.compile for every block, such as inductor; empty is off."
    )
    measure_entropy: bool = Field(
        True,
        description="Whether the policy's entropy is measured: one more pass over the logits.",
        json_schema_extra=MUTABLE,
    )
    publish: Literal["files", "broadcast"] = Field(
        "files",
        description="How weights reach the server: safetensors files, or torch.distributed.",
    )
    device: str = Field("auto", description="Device of the trainer: cpu, cuda or auto.")
    ranks: int = Field(
        1,
        ge=1,
        description="Trainer processes that share the model and the work.",
        json_schema_extra=MUTABLE,
    )
    address: str = Field(
        "127.0.0.1",
        description="Where rank 0 listens to the other ranks; ranks of another machine must reach it.",
        json_schema_extra=MUTABLE,
    )
    secret: str = Field(
        "",
        description="What ranks know one another by; needed where the address is not loopback.",
        json_schema_extra=MUTABLE,
    )
    stall_timeout_s: float = Field(
        900.0,
        ge=0,
        description="A trainer that makes no progress for so long, with work at hand, ends; 0 never ends it.",
        json_schema_extra=MUTABLE,
    )
    threads: int = Field(
        0, ge=0, description="Compute threads of the trainer; 0 shares the cores with the server."
    )
    pixel_cache_mb: int = Field(
        256,
        ge=0,
        description="Memory for patches that are kept between batches, and as much for those that other ranks read.",
        json_schema_extra=MUTABLE,
    )
    feature_cache_mb: int = Field(
        256,
        ge=0,
        description="Memory on the trainer's device for features of a frozen vision tower.",
        json_schema_extra=MUTABLE,
    )

    @field_validator("micro_batch_cost_model")
    @classmethod
    def _has_six(cls, value: list[float]) -> list[float]:
        if value and (len(value) != 6 or min(value) < 0):
            raise ValueError("take the six numbers that `sightline bench cost` prints, or none")
        return value

    @model_validator(mode="after")
    def _has_a_secret_outside(self) -> TrainerConfig:
        if not self.secret and not is_loopback(self.address):
            raise ValueError(
                f"address = {self.address!r} can be reached from elsewhere: set a secret, too"
            )
        return self


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
