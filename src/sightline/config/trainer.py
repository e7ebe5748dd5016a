"""`[trainer]`: how batches become weights."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Literal

from pydantic import Field, field_validator, model_validator

from sightline.config.section import FREE, Section


class Trainer(Section):
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    vision_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of the vision tower; unset, `lr`."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up, down to `lr_end` at the last step."
    )
    lr_end: float = Field(0.0, ge=0, description="Learning rate at the last step, as a fraction.")
    warmup_steps: int = Field(0, ge=0, description="Steps in which the learning rate rises.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Of AdamW.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Of AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW, on matrices.")
    grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    loss: Literal["ppo", "cispo", "gspo", "tis"] = Field(
        "ppo", description="The policy loss: clipped by token or by answer, or truncated weights."
    )
    loss_average: Literal["tokens", "samples", "constant"] = Field(
        "tokens", description="What the loss of a batch is divided by."
    )
    loss_constant: float = Field(
        1.0, gt=0, description='Divides the summed loss, with loss_average = "constant".'
    )
    importance_cap: float = Field(
        2.0, gt=0, description='Largest weight of a token, with loss = "tis".'
    )
    clip_low: float = Field(0.2, gt=0, description="The ratio is clipped below 1 minus this.")
    clip_high: float = Field(0.28, gt=0, description="The ratio is clipped above 1 plus this.")
    kl_weight: float = Field(
        0.0, ge=0, description="Weight of the KL to the starting checkpoint; 0 loads none."
    )
    max_sequence: int = Field(
        0, ge=0, description="Longer samples are cut, never through an image; 0 cuts none."
    )
    micro_batch_tokens: int = Field(8192, ge=1, description="Most tokens of a micro-batch.")
    micro_batch_patches: int = Field(
        65536, ge=1, description="Most image patches of a micro-batch."
    )
    micro_batch_price: list[float] = Field(
        [],
        description="What micro-batches cost, to balance ranks: the six numbers that `sightline "
        "bench cost` prints. Empty: operations counted from the model.",
    )
    checkpoint_every: int = Field(
        25, ge=1, description="Steps between checkpoints.", json_schema_extra=FREE
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Newest checkpoints that are kept.", json_schema_extra=FREE
    )
    keep_every: int = Field(
        0,
        ge=0,
        description="Checkpoints of every so many steps stay as well; 0 keeps none of them.",
        json_schema_extra=FREE,
    )
    master_dtype: Literal["float32", "model"] = Field(
        "float32",
        description="Of the weights that the optimizer moves; `model` is that of [model] dtype.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Whether a block's activations are computed again in the backward pass.",
        json_schema_extra=FREE,
    )
    compile: str = Field(
        "", description="Backend of torch.compile for every block, such as inductor; empty is off."
    )
    entropy: bool = Field(
        True,
        description="Whether the policy's entropy is measured: one more pass over the logits.",
        json_schema_extra=FREE,
    )
    publish: Literal["files", "broadcast"] = Field(
        "files",
        description="How weights reach the server: safetensors, or torch.distributed.",
    )
    device: str = Field("auto", description="cpu, cuda or auto.")
    ranks: int = Field(
        1, ge=1, description="Processes that share the model and the work.", json_schema_extra=FREE
    )
    address: str = Field(
        "127.0.0.1",
        description="Where rank 0 listens to the others; another machine's need one it can reach.",
        json_schema_extra=FREE,
    )
    secret: str = Field(
        "",
        description="What ranks know one another by; needed where the address is not loopback.",
        json_schema_extra=FREE,
    )
    stuck_after_s: float = Field(
        900.0,
        ge=0,
        description="A trainer that stands still with work at hand so long ends; 0 is never.",
        json_schema_extra=FREE,
    )
    threads: int = Field(
        0, ge=0, description="Compute threads; 0 shares the cores with the server."
    )
    pixel_cache_mb: int = Field(
        256,
        ge=0,
        description="Patches kept between batches, and as much for other ranks of a batch.",
        json_schema_extra=FREE,
    )
    feature_cache_mb: int = Field(
        256,
        ge=0,
        description="Features of images kept between steps, of a vision tower that is frozen; on "
        "the trainer's device.",
        json_schema_extra=FREE,
    )

    @field_validator("micro_batch_price")
    @classmethod
    def _has_six(cls, value: list[float]) -> list[float]:
        if value and (len(value) != 6 or min(value) < 0):
            raise ValueError("take the six numbers that `sightline bench cost` prints, or none")
        return value

    @model_validator(mode="after")
    def _has_a_secret_outside(self) -> Trainer:
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
