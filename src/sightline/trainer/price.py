"""The cost of a model's micro-batches, counted from its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from sightline.families import Forward
from sightline.pack import CostModel

# A multiplication and an addition, forward; twice as many in the backward pass.
_OPERATIONS = 6


def estimate_price(forward: Forward) -> CostModel:
    """Count the operations of this model.

    The matrices of text blocks count once per token, those of vision blocks per patch, those of
    mergers per visual token and the head per trained token. Attention counts pairs. All experts of
    a layer count.
    """
    seen = {id(parameter) for _, parameter in forward.vision_parameters()}
    blocks, model = forward.blocks(), cast(Any, forward.model)
    vision = [block for block in blocks if any(id(p) in seen for p in block.parameters())]
    text = [block for block in blocks if block not in vision]
    inside = sum(map(_count_matrix_elements, vision))
    return CostModel(
        token=_OPERATIONS * sum(map(_count_matrix_elements, text)),
        # Scores and their sum of values: a product of the block's width each.
        attended=2 * _OPERATIONS * sum(map(_hidden_size, text)),
        trained=_OPERATIONS * _count_matrix_elements(model.get_output_embeddings()),
        patch=_OPERATIONS * (inside + _tower_outside_blocks(forward, vision)),
        attended_patch=2 * _OPERATIONS * sum(map(_hidden_size, vision)),
    )


def _tower_outside_blocks(forward: Forward, blocks: Sequence[nn.Module]) -> float:
    """Matrix elements of the tower outside its blocks, by patch: convolutions and mergers."""
    smallest = forward.blank_image()
    if smallest is None:
        return 0.0
    tables = [m for m in forward.model.modules() if isinstance(m, nn.Embedding)]
    apart = {id(p) for module in (*blocks, *tables) for p in module.parameters()}
    own = [p for _, p in forward.vision_parameters() if id(p) not in apart]
    # A patch embedding is a convolution. The smallest image is one visual token.
    embed = sum(p.numel() for p in own if p.ndim > 2)
    return embed + sum(p.numel() for p in own if p.ndim == 2) / math.prod(smallest[1])


def _count_matrix_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.ndim > 1)


def _hidden_size(block: nn.Module) -> int:
    """The size of the hidden states: a block's last vector is a norm over them or added to them."""
    vectors = [p.numel() for p in block.parameters() if p.ndim == 1]
    return vectors[-1] if vectors else 0
