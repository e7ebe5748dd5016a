"""Count the parameters, activations and operations of a model on the meta device.

For the backward pass a block keeps, per row (a token, or a patch of an image):

    compiled        each input and output of its matrix products once; rotated queries and keys
    not compiled    also the float32 input of its norms, and the activated gate
    recomputed      the block's input; compiled text blocks also attention's operands and output
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

from torch import nn

from sightline.compute.model import load_model
from sightline.config import LoraConfig, ModelConfig
from sightline.families import Forward, load_family
from sightline.families.checkpoint_files import resolve_checkpoint
from sightline.pack import CostModel
from sightline.trainer.distribute import OPERATIONS, estimate_price
from sightline.trainer.policy import load_policy

OUTPUTS = ("o_proj", "proj", "out_proj", "wo")
"""Names of the last matrix of an attention layer."""
CACHED = ("k_proj", "v_proj", "kv_b_proj")
"""Names of the matrices whose outputs the KV cache holds."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class BlockRow(NamedTuple):
    """Elements per row that a block keeps for its backward pass."""

    hidden: int
    products: int
    """Inputs and outputs of matrix products, and rotated queries and keys."""
    attention: int
    """Attention's operands and output, which `products` includes."""
    normalized: int
    """Elements that pass through norms."""
    gated: int
    """Elements of the activated gate."""

    def kept_bytes(self, itemsize: int, is_compiled: bool) -> int:
        extra = 0 if is_compiled else 4 * self.normalized + itemsize * self.gated
        return itemsize * self.products + extra


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The numbers of a model that determine the memory of its processes."""

    parameters: int
    trained: int
    largest_block: int
    """Parameters of the largest block."""
    outside_blocks: int
    """Parameters outside blocks: embeddings, head and mergers."""
    text: tuple[BlockRow, ...]
    tower: tuple[BlockRow, ...]
    tower_outside: int
    """Elements that the tower keeps per patch outside its blocks."""
    trains_tower: bool
    patch_bytes: int
    patches_per_token: int
    """Patches of an image per token that shows it. 0 without a vision tower."""
    vocab: int
    hidden: int
    cached: int
    """Elements of the KV cache per token."""
    price: CostModel

    def count_decode_bytes(self, steps: float, keys: float, itemsize: int) -> float:
        """Return the bytes that decode steps read: once the weights that compute one token, and
        the keys and values of each row."""
        weights = (self.price.token + self.price.trained) / OPERATIONS
        return itemsize * (steps * weights + keys * self.cached)


@lru_cache(maxsize=8)
def measure_model(model: ModelConfig, lora: LoraConfig) -> ModelMemory:
    """Build the model without weights and count. The checkpoint needs no weights."""
    path = resolve_checkpoint(model.path)
    family = load_family(path, model.exact, **model.overrides())
    forward = load_model(path, family, "meta", model.dtype)
    seen = {id(parameter) for _, parameter in forward.vision_parameters()}
    blocks = forward.blocks()
    tower = [block for block in blocks if any(id(p) in seen for p in block.parameters())]
    text = [block for block in blocks if block not in tower]
    config: Any = cast(Any, forward.model).config.get_text_config()
    active = next((n for key in ACTIVE_EXPERTS if (n := getattr(config, key, None))), 1)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    blank, head = forward.blank_image(), cast(Any, forward.model).get_output_embeddings()
    rows = tuple(measure_block(block, active) for block in text)
    tower_rows = tuple(measure_block(block, active) for block in tower)
    outside = _count_tower_outside(forward, tower, math.prod(blank[1])) if blank else 0
    modules = [entry for block in text for entry in block.named_modules()]
    products = [(n.rpartition(".")[2], m) for n, m in modules if isinstance(m, nn.Linear)]
    cached = sum(layer.out_features for name, layer in products if name in CACHED)
    price = estimate_price(forward)  # counts all experts
    idle = sum(stack.numel() * (1 - active / len(stack)) for b in text for stack in _experts(b))
    price = replace(price, token=price.token - OPERATIONS * idle)
    total = sum(p.numel() for p in forward.model.parameters())
    forward = load_policy(model, lora, 0, family, "meta")
    trained = [p.numel() for p in forward.model.parameters() if p.requires_grad]
    return ModelMemory(
        parameters=sum(p.numel() for p in forward.model.parameters()),
        trained=sum(trained),
        largest_block=max(sizes, default=0),
        outside_blocks=total - sum(sizes),
        text=rows,
        tower=tower_rows,
        tower_outside=outside,
        trains_tower=any(p.requires_grad for _, p in forward.vision_parameters()),
        patch_bytes=blank[0].shape[1] if blank else 0,
        patches_per_token=math.prod(blank[1]) if blank else 0,
        vocab=head.weight.shape[0],
        hidden=head.weight.shape[1],
        cached=cached,
        price=price,
    )


def measure_block(block: nn.Module, active_experts: int) -> BlockRow:
    """Count a block's elements per row. Of its experts, `active_experts` compute a row."""
    inputs: dict[tuple[str, int, bool], int] = {}
    outputs = attention = rotated = gated = normalized = 0
    widths: dict[str, int] = {}
    for name, module in block.named_modules():
        expert = _EXPERT.search(f"{name}.")
        if expert and int(expert[1]) >= active_experts:
            continue
        layers = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        for number, (child, layer) in enumerate(layers.items(), 1):
            # The first matrices of a layer share their input, such as those of q, k and v.
            is_last = child in OUTPUTS or 1 < number == len(layers)
            inputs[name, layer.in_features, is_last] = layer.in_features
            widths[f"{name}.{child}"] = layer.out_features
            outputs += layer.out_features
            gated += layer.in_features if child == "down_proj" else 0
        if last := next((layers.pop(n) for n in OUTPUTS if n in layers), None):
            operands = sum(layer.out_features for layer in layers.values())
            values = layers["v_proj"].out_features if "v_proj" in layers else operands // 3
            rotated += operands - values
            attention += operands + last.in_features
    # Of each expert, the rows that reach it and those that leave it.
    outputs += sum(active_experts * sum(stack.shape[1:]) for stack in _experts(block))
    hidden = next((in_features for _, in_features, _ in inputs), 0)
    for name, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "variance_epsilon") and isinstance(weight, nn.Parameter):
            product = name.replace("_norm", "_proj")  # norms of queries and keys cover all heads
            normalized += widths.get(product, weight.numel())
    products = sum(inputs.values()) + outputs + rotated
    return BlockRow(hidden, products, attention, normalized, gated)


def _experts(block: nn.Module) -> list[nn.Parameter]:
    """Return matrices that a block stacks, one for each expert."""
    return [p for p in block.parameters() if p.ndim == 3]


def _count_tower_outside(forward: Forward, blocks: Sequence[nn.Module], merged: int) -> int:
    """Return the elements per patch of the embedding and of the mergers, which see `merged` patches
    at once."""
    inside = {id(module) for block in blocks for module in block.modules()}
    seen = {id(parameter) for _, parameter in forward.vision_parameters()}
    total = 0.0
    for module in forward.model.modules():
        weight = getattr(module, "weight", None)
        if id(module) in inside or id(weight) not in seen or weight is None or weight.ndim < 2:
            continue
        if isinstance(module, nn.Linear):
            total += (module.in_features + module.out_features) / merged
        elif weight.ndim > 2:  # a convolution over whole patches
            total += weight[0].numel() + len(weight)
    return int(total)
