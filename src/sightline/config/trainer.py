"""`[trainer]`: how batches become weights."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sightline.config.section import ConfigSection, Mutable


class TrainerConfig(ConfigSection):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    vision_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the vision tower; `lr` where unset."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay after the warm-up, down to `final_lr_fraction` of `lr`."""
    final_lr_fraction: float = Field(0.0, ge=0)
    """Learning rate at the last step, as a fraction of `lr`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0 to `lr`."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, which applies to matrices alone."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Norm that gradients are clipped to."""
    loss: str = "ppo"
    """The policy loss: ppo, cispo, gspo, tis, or 'module:function' of your own
    (docs/algorithms.md)."""
    loss_args: dict[str, Any] = {}
    """Keyword arguments of the loss, such as clip_low, clip_high or ratio_cap."""
    loss_aggregation: str = "tokens"
    """What a token weighs in the loss of its batch: tokens, samples, constant, or 'module:function'
    of your own."""
    loss_aggregation_args: dict[str, Any] = {}
    """Keyword arguments of the aggregation, such as the divisor of constant."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL to the starting checkpoint; 0 loads no reference."""
    max_sequence_tokens: int = Field(0, ge=0)
    """Most tokens of a sample, which is cut there or before an image; 0 cuts none."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens of a micro-batch."""
    micro_batch_patches: int = Field(65536, ge=1)
    """Most image patches of a micro-batch."""
    micro_batch_cost_model: list[float] = []
    """Cost of a micro-batch, by which ranks are balanced: the six numbers that `sightline bench
    cost` prints; empty counts the model's operations."""
    checkpoint_every: Mutable[int] = Field(25, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: Mutable[int] = Field(2, ge=1)
    """Number of newest checkpoints that are kept."""
    keep_checkpoints_every: Mutable[int] = Field(0, ge=0)
    """Steps between checkpoints that are kept for good; 0 keeps the newest alone."""
    master_dtype: Literal["float32", "model"] = "float32"
    """Precision of the weights that the optimizer updates; `model` is [model] dtype."""
    activation_checkpointing: Mutable[bool] = False
    """Whether a block's activations are computed again in the backward pass."""
    compile_backend: str = ""
    """Backend of torch.compile for every block, such as inductor; empty is off."""
    measure_entropy: Mutable[bool] = True
    """Whether the policy's entropy is measured: one more pass over the logits."""
    publish: Literal["files", "broadcast"] = "files"
    """How weights reach the server: safetensors files, or torch.distributed."""
    device: str = "auto"
    """Device of the trainer: cpu, cuda or auto."""
    ranks: Mutable[int] = Field(1, ge=1)
    """Number of trainer processes that share the model and the work."""
    address: Mutable[str] = "127.0.0.1"
    """Address at which rank 0 listens to the other ranks, also to those of other machines."""
    secret: Mutable[str] = ""
    """Shared secret of the ranks; needed where `address` is not loopback."""
    stall_timeout_s: Mutable[float] = Field(900.0, ge=0)
    """Seconds without progress, with work at hand, after which the trainer ends; 0 is never."""
    threads: int = Field(0, ge=0)
    """Compute threads of the trainer; 0 shares the cores with the server."""
    pixel_cache_mb: Mutable[int] = Field(256, ge=0)
    """MB of memory for the patches of images that are kept between batches."""
    feature_cache_mb: Mutable[int] = Field(256, ge=0)
    """MB on the trainer's device for features of a frozen vision tower."""

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
