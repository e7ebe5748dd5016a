"""Patch embeddings as one product of matrices.

A model gives each patch to a convolution whose kernel is the whole patch. That is a product, for
which a GPU has faster kernels than for convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Convolution: TypeAlias = nn.Conv2d | nn.Conv3d


def linearize_patch_embeddings(model: nn.Module) -> None:
    """In place; parameters keep their names and shapes."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and _is_patch_embedding(module):
            module.forward = partial(  # type: ignore[method-assign]
                _embed, module, module.forward
            )


def _is_patch_embedding(module: Convolution) -> bool:
    return (
        module.kernel_size == module.stride
        and module.groups == 1
        and not isinstance(module.padding, str)
        and not any(module.padding)
        and all(step == 1 for step in module.dilation)
    )


def _embed(
    module: Convolution,
    convolve: Callable[[Tensor], Tensor],
    x: Float[Tensor, "patches channels *size"],
) -> Float[Tensor, "patches hidden *ones"]:
    if x.shape[2:] != module.kernel_size:
        return convolve(x)
    out = F.linear(x.flatten(1), module.weight.flatten(1), module.bias)
    return out.view(*out.shape, *(1 for _ in module.kernel_size))
